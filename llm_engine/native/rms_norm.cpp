// Root-mean-square norm of rows, after something is added to them.
#include "simd.h"

using namespace twinpool;

namespace {

__m512 load(__mmask16 mask, const bf16* source) { return load_floats(mask, source); }
__m512 load(__mmask16 mask, const float* source) { return _mm512_maskz_loadu_ps(mask, source); }

template <class Number>
void norm(Number* x, const bf16* delta, const float* weight, bf16* y, int64_t num_tokens, int64_t num_heads, int64_t width,
          int64_t stride, float eps) {
    const int64_t num_rows = num_tokens * num_heads;
#pragma omp parallel for schedule(static) if (num_rows * width >= kMinParallelWork)
    for (int64_t m = 0; m < num_rows; m++) {
        Number* row = x + m / num_heads * stride + m % num_heads * width;
        __m512 squares = _mm512_setzero_ps();
        for (int64_t i = 0; i < width; i += kLanes) {
            const __mmask16 mask = first_lanes(width - i);
            __m512 value = load(mask, row + i);
            if constexpr (sizeof(Number) == sizeof(float))
                if (delta) {
                    value = _mm512_add_ps(value, load(mask, delta + m * width + i));
                    _mm512_mask_storeu_ps(row + i, mask, value);
                }
            squares = _mm512_fmadd_ps(value, value, squares);
        }
        const float mean = _mm512_reduce_add_ps(squares) / float(width);
        const __m512 factor = _mm512_set1_ps(1.0f / __builtin_sqrtf(mean + eps));
        for (int64_t i = 0; i < width; i += kLanes) {
            const __mmask16 mask = first_lanes(width - i);
            const __m512 normed = _mm512_mul_ps(load(mask, row + i), factor);
            store_floats(mask, y + m * width + i, _mm512_mul_ps(normed, _mm512_maskz_loadu_ps(mask, weight + i)));
        }
    }
}

}  // namespace

// x, of num_tokens times num_heads rows of `width`: a token's rows lie side by side, tokens lie `stride` apart. weight [width],
// y [num_tokens, num_heads, width].
extern "C" void twinpool_rms_norm_bfloat16(bf16* x, const float* weight, bf16* y, int64_t num_tokens, int64_t num_heads,
                                           int64_t width, int64_t stride, float eps) {
    norm<bf16>(x, nullptr, weight, y, num_tokens, num_heads, width, stride, eps);
}

// delta, or null, is added to x first. x, delta and y [num_rows, width].
extern "C" void twinpool_add_rms_norm_float32(float* x, const bf16* delta, const float* weight, bf16* y, int64_t num_rows,
                                              int64_t width, float eps) {
    norm<float>(x, delta, weight, y, num_rows, 1, width, width, eps);
}
