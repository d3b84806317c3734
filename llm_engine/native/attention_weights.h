// From the scores of a chunk of keys to the weights of their values.
#pragma once

#include "attention_chunk.h"
#include "fixed_point.h"

namespace twinpool {

constexpr int kPiece = 32;  // numbers of a head in a register

// What a chunk gives a head: the highest score, the sum of the weights exp(score - top), that of weight * value [head_dim,
// padded to whole pieces].
struct Part {
    float* memory;

    float& top() const { return memory[0]; }
    float& sum() const { return memory[1]; }
    float* values() const { return memory + kLanes; }
    static int64_t size(int64_t head_dim) { return kLanes + (head_dim + kPiece - 1) / kPiece * kPiece; }
};

inline float highest(const float* scores, int64_t count) {
    __m512 top = _mm512_set1_ps(kNever);
    for (int64_t k = 0; k < count; k += kLanes)
        top = _mm512_max_ps(top, _mm512_mask_loadu_ps(top, first_lanes(count - k), scores + k));
    return _mm512_reduce_max_ps(top);
}

// The weights of `count` keys, rounded to bfloat16, and zeros up to a whole register.
inline void weigh(const float* scores, int64_t count, uint16_t* weights, const Part& part) {
    __m512 sum = _mm512_setzero_ps();
    part.top() = highest(scores, count);
    const __m512 top = _mm512_set1_ps(part.top());
    for (int64_t k = 0; k < count; k += kLanes) {
        const __mmask16 mask = first_lanes(count - k);
        const __m512 weight = exp_floats(_mm512_sub_ps(_mm512_maskz_loadu_ps(mask, scores + k), top));
        const __m256i rounded = narrowed(_mm512_maskz_mov_ps(mask, weight));
        _mm256_storeu_si256((__m256i*)(weights + k), rounded);
        sum = _mm512_add_ps(sum, widened(rounded));
    }
    part.sum() = _mm512_reduce_add_ps(sum);
}

// The same times the values' scales, as integers. Takes the place of the scores. Returns the integers' factor.
inline float weigh_scaled(float* scores, const float* value_scales, int64_t count, uint16_t* weights, const Part& part) {
    __m512 sum = _mm512_setzero_ps();
    __m512i largest = _mm512_setzero_si512();
    part.top() = highest(scores, count);
    const __m512 top = _mm512_set1_ps(part.top());
    for (int64_t k = 0; k < count; k += kLanes) {
        const __mmask16 mask = first_lanes(count - k);
        const __m512 weight = _mm512_maskz_mov_ps(mask, exp_floats(_mm512_sub_ps(_mm512_maskz_loadu_ps(mask, scores + k), top)));
        const __m512 scaled = _mm512_mul_ps(weight, _mm512_maskz_loadu_ps(mask, value_scales + k));
        _mm512_storeu_ps(scores + k, scaled);
        largest = _mm512_max_epu32(largest, (__m512i)_mm512_abs_ps(scaled));
        sum = _mm512_add_ps(sum, weight);
    }
    part.sum() = _mm512_reduce_add_ps(sum);
    const FixedPoint integers(largest, INT16_MAX);
    for (int64_t k = 0; k < count; k += kLanes) integers.store(weights + k, 0xffff, _mm512_loadu_ps(scores + k));
    return integers.factor;
}

}  // namespace twinpool
