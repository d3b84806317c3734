// What a gated feed-forward network does between its two products: the activation of the gate, times up.
#include "simd.h"

namespace twinpool {
namespace {

// gate / (1 + exp(-gate)). For a very negative gate the exponential is infinite and the quotient 0, as it should be.
inline __m512 silu(__m512 gate) {
    const __m512 power = exp_floats(_mm512_sub_ps(_mm512_setzero_ps(), gate));
    return _mm512_div_ps(gate, _mm512_add_ps(_mm512_set1_ps(1.0f), power));
}

// gate / 2 * (1 + tanh(sqrt(2 / pi) * (gate + 0.044715 gate^3))), which is gate / (1 + exp(-2 * that argument)).
inline __m512 gelu_tanh(__m512 gate) {
    const __m512 cubic = _mm512_fmadd_ps(_mm512_mul_ps(gate, gate), _mm512_set1_ps(0.044715f), _mm512_set1_ps(1.0f));
    const __m512 power = exp_floats(_mm512_mul_ps(_mm512_mul_ps(gate, cubic), _mm512_set1_ps(-1.59576912f)));
    return _mm512_div_ps(gate, _mm512_add_ps(_mm512_set1_ps(1.0f), power));
}

struct Call {
    int64_t num_rows;
    const bf16* gate_up;  // [num_rows, 2 * width]
    bf16* y;  // [num_rows, width]
    int64_t width;
};

template <class Activation>
void multiply(Activation activation, const Call& c) {
#pragma omp parallel for schedule(static) if (c.num_rows * c.width >= kMinParallelWork)
    for (int64_t m = 0; m < c.num_rows; m++) {
        const bf16* gate = c.gate_up + 2 * m * c.width;
        for (int64_t i = 0; i < c.width; i += kLanes) {
            const __mmask16 mask = first_lanes(c.width - i);
            const __m512 activated = activation(load_floats(mask, gate + i));
            store_floats(mask, c.y + m * c.width + i, _mm512_mul_ps(activated, load_floats(mask, gate + c.width + i)));
        }
    }
}

}  // namespace
}  // namespace twinpool

extern "C" void twinpool_silu_multiply(const twinpool::Call* call) {
    twinpool::multiply([](__m512 gate) { return twinpool::silu(gate); }, *call);
}

extern "C" void twinpool_gelu_tanh_multiply(const twinpool::Call* call) {
    twinpool::multiply([](__m512 gate) { return twinpool::gelu_tanh(gate); }, *call);
}
