// The numbers of keys and values in the paged cache, of each type that it may have: bfloat16, float16, or int8 with a scale for
// each head of a token. Kernels multiply them as bfloat16, or those of int8 as integers of 16 bits, by such integers, exactly.
// Bfloat16 holds all that is stored here but 65504, the float16 that larger numbers are clamped to: it is read as 65536.
#pragma once

#include "simd.h"

namespace twinpool {

struct float16 {
    uint16_t bits;
};

template <class Number>
constexpr bool has_scales = false;
template <>
constexpr bool has_scales<int8_t> = true;

// 32 numbers as they are multiplied; those outside the mask are 0, and their memory is not touched.
inline __m512i load_numbers(__mmask32 mask, const bf16* source) { return _mm512_maskz_loadu_epi16(mask, source); }

inline __m512i load_numbers(__mmask32 mask, const float16* source) {
    const __m512i all = _mm512_maskz_loadu_epi16(mask, source);
    const __m512 first = _mm512_cvtph_ps(_mm512_castsi512_si256(all));
    return (__m512i)_mm512_cvtne2ps_pbh(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(all, 1)), first);
}

inline __m512i load_numbers(__mmask32 mask, const int8_t* source) {
    return _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(mask, source));
}

// Sums of products, sixteen in a register: float32, for int8 integers. Were both of one type, the compiler would not keep all of
// a kernel's sums in registers: that made attention a third slower.
template <class Number>
struct Sums {
    using Register = __m512;
};
template <>
struct Sums<int8_t> {
    using Register = __m512i;
};

inline __m512 add_products(__m512 sums, __m512i numbers, __m512i factors) {
    return _mm512_dpbf16_ps(sums, (__m512bh)numbers, (__m512bh)factors);
}

inline __m512i add_products(__m512i sums, __m512i numbers, __m512i factors) {
    return _mm512_dpwssd_epi32(sums, numbers, factors);
}

template <class Number>
inline __m512 add_sums(__m512 one, __m512 other) {
    if constexpr (has_scales<Number>)
        return (__m512)_mm512_add_epi32((__m512i)one, (__m512i)other);
    else
        return _mm512_add_ps(one, other);
}

inline __m512 sums_as_floats(__m512 sums) { return sums; }

inline __m512 sums_as_floats(__m512i sums) { return _mm512_cvtepi32_ps(sums); }

// A head of bfloat16 numbers goes into the cache, with its scale where it has one. kv_numbers.py computes the same bits.
inline void store_head(const bf16* source, bf16* destination, float*, int64_t head_dim) {
    std::memcpy(destination, source, head_dim * sizeof(bf16));
}

inline void store_head(const bf16* source, float16* destination, float*, int64_t head_dim) {
    const __m512 largest = _mm512_set1_ps(65504.0f), smallest = _mm512_set1_ps(-65504.0f);
    for (int64_t d = 0; d < head_dim; d += kLanes) {
        const __mmask16 mask = first_lanes(head_dim - d);
        const __m512 values = _mm512_max_ps(smallest, _mm512_min_ps(largest, load_floats(mask, source + d)));  // a NaN stays one
        _mm256_mask_storeu_epi16(destination + d, mask, _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
}

inline void store_head(const bf16* source, int8_t* destination, float* scale, int64_t head_dim) {
    __m512i largest = _mm512_setzero_si512();  // as bits, of which those of a NaN are the largest
    for (int64_t d = 0; d < head_dim; d += kLanes) {
        const __m512 values = _mm512_abs_ps(load_floats(first_lanes(head_dim - d), source + d));
        largest = _mm512_max_epu32(largest, (__m512i)values);
    }
    const uint32_t bits = _mm512_reduce_max_epu32(largest);
    float magnitude;
    std::memcpy(&magnitude, &bits, sizeof magnitude);
    *scale = magnitude / 127.0f;
    const __m512 divisor = _mm512_set1_ps(*scale == 0.0f ? 1.0f : *scale);
    for (int64_t d = 0; d < head_dim; d += kLanes) {
        const __mmask16 mask = first_lanes(head_dim - d);
        const __m512 quotient = _mm512_div_ps(load_floats(mask, source + d), divisor);
        const __mmask16 is_number = _mm512_cmp_ps_mask(quotient, quotient, _CMP_ORD_Q);  // infinity / infinity is none
        const __m512i rounded = _mm512_maskz_cvtps_epi32(is_number, quotient);
        const __m512i kept = _mm512_max_epi32(_mm512_set1_epi32(-127), _mm512_min_epi32(_mm512_set1_epi32(127), rounded));
        _mm_mask_storeu_epi8(destination + d, mask, _mm512_cvtepi32_epi8(kept));
    }
}

}  // namespace twinpool
