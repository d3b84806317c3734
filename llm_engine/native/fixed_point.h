// Numbers as integers of 16 bits with one factor: what the integers of a cache are multiplied by, exactly.
#pragma once

#include "simd.h"

namespace twinpool {

// The largest number becomes `limit`.
struct FixedPoint {
    __m512 inverse;
    float factor;  // of the integers; NaN where one of the numbers is

    // largest: magnitudes as bits, of which those of a NaN are the largest.
    FixedPoint(__m512i largest, float limit) {
        const uint32_t bits = _mm512_reduce_max_epu32(largest);
        float magnitude;
        std::memcpy(&magnitude, &bits, sizeof magnitude);
        factor = magnitude / limit;
        inverse = _mm512_set1_ps(magnitude > 1e-30f ? limit / magnitude : 0.0f);
    }

    void store(uint16_t* destination, __mmask16 mask, __m512 values) const {
        const __m512i integers = _mm512_cvtps_epi32(_mm512_mul_ps(values, inverse));
        _mm256_mask_storeu_epi16(destination, mask, _mm512_cvtepi32_epi16(integers));
    }
};

}  // namespace twinpool
