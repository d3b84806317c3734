// Root-mean-square norm of rows, after something is added to them.
#include "simd.h"

using namespace twinpool;

namespace {

__m512 load(__mmask16 mask, const bf16* source) { return load_floats(mask, source); }
__m512 load(__mmask16 mask, const float* source) { return _mm512_maskz_loadu_ps(mask, source); }

// Norms a token's rows, num_heads of them that lie side by side.
template <class Number>
struct Call {
    int64_t num_tokens;
    Number* x;  // [num_tokens, num_heads, width], tokens `stride` apart
    const bf16* delta;  // [num_tokens, width], which is added to x first, or null
    const float* weight;  // [width]
    bf16* y;  // [num_tokens, num_heads, width]
    int64_t num_heads, width, stride;
    float eps;
};

template <class Number>
void norm(const Call<Number>& c) {
    const int64_t width = c.width, num_rows = c.num_tokens * c.num_heads;
#pragma omp parallel for schedule(static) if (num_rows * width >= kMinParallelWork)
    for (int64_t m = 0; m < num_rows; m++) {
        Number* row = c.x + m / c.num_heads * c.stride + m % c.num_heads * width;
        __m512 squares = _mm512_setzero_ps();
        for (int64_t i = 0; i < width; i += kLanes) {
            const __mmask16 mask = first_lanes(width - i);
            __m512 value = load(mask, row + i);
            if constexpr (sizeof(Number) == sizeof(float))
                if (c.delta) {
                    value = _mm512_add_ps(value, load(mask, c.delta + m * width + i));
                    _mm512_mask_storeu_ps(row + i, mask, value);
                }
            squares = _mm512_fmadd_ps(value, value, squares);
        }
        const float mean = _mm512_reduce_add_ps(squares) / float(width);
        const __m512 factor = _mm512_set1_ps(1.0f / __builtin_sqrtf(mean + c.eps));
        for (int64_t i = 0; i < width; i += kLanes) {
            const __mmask16 mask = first_lanes(width - i);
            const __m512 normed = _mm512_mul_ps(load(mask, row + i), factor);
            store_floats(mask, c.y + m * width + i, _mm512_mul_ps(normed, _mm512_maskz_loadu_ps(mask, c.weight + i)));
        }
    }
}

}  // namespace

extern "C" void twinpool_rms_norm_bfloat16(const Call<bf16>* call) { norm(*call); }

extern "C" void twinpool_add_rms_norm_float32(const Call<float>* call) { norm(*call); }
