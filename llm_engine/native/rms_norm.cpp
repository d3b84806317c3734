// Root-mean-square norm of rows, after something is added to them.
#include "simd.h"

using namespace twinpool;

// x, of num_tokens times num_heads rows of `width`: a token's rows lie side by side, tokens lie `stride` apart. delta, or null,
// is added to x first; then there is one head. weight [width]. y [num_tokens, num_heads, width].
extern "C" void twinpool_rms_norm(bf16* x, const bf16* delta, const float* weight, bf16* y, int64_t num_tokens,
                                  int64_t num_heads, int64_t width, int64_t stride, float eps) {
    const int64_t num_rows = num_tokens * num_heads;
#pragma omp parallel for schedule(static) if (num_rows * width >= kMinParallelWork)
    for (int64_t m = 0; m < num_rows; m++) {
        bf16* row = x + m / num_heads * stride + m % num_heads * width;
        __m512 squares = _mm512_setzero_ps();
        for (int64_t i = 0; i < width; i += kLanes) {
            const __mmask16 mask = first_lanes(width - i);
            __m512 value = load_floats(mask, row + i);
            if (delta) {
                const __m256i sum = narrowed(_mm512_add_ps(value, load_floats(mask, delta + m * width + i)));
                _mm256_mask_storeu_epi16(row + i, mask, sum);
                value = widened(sum);
            }
            squares = _mm512_fmadd_ps(value, value, squares);
        }
        const float mean = _mm512_reduce_add_ps(squares) / float(width);
        const __m512 factor = _mm512_set1_ps(1.0f / __builtin_sqrtf(mean + eps));
        for (int64_t i = 0; i < width; i += kLanes) {
            const __mmask16 mask = first_lanes(width - i);
            const __m512 normed = _mm512_mul_ps(load_floats(mask, row + i), factor);
            store_floats(mask, y + m * width + i, _mm512_mul_ps(normed, _mm512_maskz_loadu_ps(mask, weight + i)));
        }
    }
}
