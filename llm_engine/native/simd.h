// What the kernels need of AVX-512 with BF16. A number of the model is a bfloat16, held as its 16 bits; a register holds
// sixteen float32 or 32 bfloat16.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>

namespace twinpool {

using bf16 = uint16_t;

constexpr int kLanes = 16;

// Work on fewer elements than this is done before another thread would have woken up.
constexpr int64_t kMinParallelWork = 32768;

// The first `count` lanes of a register, all of them where `count` is larger.
inline __mmask16 first_lanes(int64_t count) { return count >= 16 ? 0xffff : (1u << count) - 1; }

inline __mmask32 first_halves(int64_t count) { return count >= 32 ? 0xffffffff : (1u << count) - 1; }

inline __m512 widened(__m256i values) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(values), 16)); }

// Lanes outside the mask are 0, and their memory is not touched.
inline __m512 load_floats(__mmask16 mask, const bf16* source) { return widened(_mm256_maskz_loadu_epi16(mask, source)); }

inline __m256i narrowed(__m512 values) { return (__m256i)_mm512_cvtneps_pbh(values); }

inline void store_floats(__mmask16 mask, bf16* destination, __m512 values) {
    _mm256_mask_storeu_epi16(destination, mask, narrowed(values));
}

// e to the power of x, to about one unit in the last place; 0 below -87, infinity from 89 on.
inline __m512 exp_floats(__m512 x) {
    const __mmask16 is_tiny = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_LT_OS);
    x = _mm512_min_ps(_mm512_set1_ps(89.0f), x);  // in this order a NaN stays one
    const __m512 power = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);  // to nearest
    // x - power * log(2), which is taken in two parts so that nothing is lost
    __m512 rest = _mm512_fnmadd_ps(power, _mm512_set1_ps(0.693359375f), x);
    rest = _mm512_fnmadd_ps(power, _mm512_set1_ps(-2.12194440e-4f), rest);
    // the series 1/7!, 1/6! ... 1/0! is exact enough for |rest| <= log(2) / 2
    __m512 sum = _mm512_set1_ps(1.98412698e-4f);
    for (float coefficient : {1.38888889e-3f, 8.33333333e-3f, 4.16666667e-2f, 1.66666667e-1f, 0.5f, 1.0f, 1.0f})
        sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(coefficient));
    return _mm512_maskz_mov_ps(_knot_mask16(is_tiny), _mm512_scalef_ps(sum, power));
}

}  // namespace twinpool
