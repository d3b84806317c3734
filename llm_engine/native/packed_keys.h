// Keys and values of a sequence in the order of a packed weight matrix (packed_weight.py), as bfloat16: keys as channels of the
// scores' product, values as inputs of the product with the weights.
#pragma once

#include "cached_numbers.h"
#include "packed_layout.h"

namespace twinpool {

// Of one key-value head: keys in blocks of 16, each with all groups of their dimensions; values in groups of 32, each with all
// blocks of their dimensions. The dimensions are padded to whole groups.
struct PackedKeys {
    bf16* keys;
    bf16* values;
};

// Where a token's key and value of one head lie in the cache.
template <class Number>
struct CachedHead {
    const Number* key;
    const Number* value;
    float key_scale, value_scale;
};

// The first `count` numbers, at most 32 of them, as bfloat16; the rest is 0, and its memory is not touched.
template <class Number>
inline __m512i load_bfloat16(int64_t count, const Number* source, float) {
    return load_numbers(first_halves(count), source);
}

inline __m512i load_bfloat16(int64_t count, const int8_t* source, float scale) {
    const __m256i bytes = _mm256_maskz_loadu_epi8(first_halves(count), source);
    const __m512 first = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes)));
    const __m512 second = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1)));
    const __m512 factor = _mm512_set1_ps(scale);
    return (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(second, factor), _mm512_mul_ps(first, factor));
}

// Lane j of register i goes to lane i of register j.
inline void transpose(__m512i* rows) {
    for (int step = 1; step < kLanes; step *= 2) {
        alignas(64) int32_t low[kLanes], high[kLanes];
        for (int lane = 0; lane < kLanes; lane++) {
            low[lane] = lane & step ? kLanes + (lane ^ step) : lane;
            high[lane] = lane & step ? kLanes + lane : lane ^ step;
        }
        const __m512i for_low = _mm512_load_si512(low), for_high = _mm512_load_si512(high);
        for (int i = 0; i < kLanes; i++) {
            if (i & step) continue;
            const __m512i first = rows[i], second = rows[i + step];
            rows[i] = _mm512_permutex2var_epi32(first, for_low, second);
            rows[i + step] = _mm512_permutex2var_epi32(first, for_high, second);
        }
    }
}

// Lane i of the result: lane i of both, that of `first` in the low bits.
inline __m512i interleaved(__m256i first, __m256i second) {
    return _mm512_or_si512(_mm512_cvtepu16_epi32(first), _mm512_slli_epi32(_mm512_cvtepu16_epi32(second), 16));
}

// The group of keys that begins at first_key: `count` of them, and zeros in the other places.
template <class Number>
void pack_keys(const CachedHead<Number>* heads, int64_t count, int64_t head_dim, const PackedKeys& packed, int64_t first_key) {
    const int64_t dim = padded(head_dim, kGroup);
    for (int64_t d = 0; d < dim; d += kGroup) {
        for (int64_t i = 0; i < kGroup; i += kLanes) {
            __m512i lines[kLanes];
            for (int64_t j = 0; j < kLanes; j++) {
                const CachedHead<Number>& head = heads[i + j];
                lines[j] = i + j < count ? load_bfloat16(head_dim - d, head.key + d, head.key_scale) : _mm512_setzero_si512();
            }
            transpose(lines);
            bf16* block = packed.keys + (first_key + i) * dim + d * kLanes;
            for (int64_t pair = 0; pair < kPairs; pair++) _mm512_storeu_si512(block + pair * 2 * kLanes, lines[pair]);
        }
        bf16* block = packed.values + first_key * dim + d * kGroup;
        for (int64_t i = 0; i < kGroup; i += 2) {
            __m512i two[2];
            for (int64_t j = 0; j < 2; j++) {
                const CachedHead<Number>& head = heads[i + j];
                two[j] = i + j < count ? load_bfloat16(head_dim - d, head.value + d, head.value_scale) : _mm512_setzero_si512();
            }
            for (int half = 0; half < 2; half++) {
                const __m256i first = half ? _mm512_extracti64x4_epi64(two[0], 1) : _mm512_castsi512_si256(two[0]);
                const __m256i second = half ? _mm512_extracti64x4_epi64(two[1], 1) : _mm512_castsi512_si256(two[1]);
                _mm512_storeu_si512(block + half * kBlockNumbers + i * kLanes, interleaved(first, second));
            }
        }
    }
}

}  // namespace twinpool
