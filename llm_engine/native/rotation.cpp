// Rotary embedding of queries and keys, which go on to where they are needed: keys, with their values, into the paged cache.
#include <vector>

#include "cached_numbers.h"

namespace twinpool {
namespace {

// One head: its first half against its second, in float32, or without angles as it is.
void rotate(const bf16* source, const float* cos, const float* sin, bf16* destination, int64_t head_dim) {
    if (!cos) {
        std::memcpy(destination, source, head_dim * sizeof(bf16));
        return;
    }
    const int64_t half = head_dim / 2;
    for (int64_t i = 0; i < half; i += kLanes) {
        const __mmask16 mask = first_lanes(half - i);
        const __m512 first = load_floats(mask, source + i), second = load_floats(mask, source + half + i);
        const __m512 c = _mm512_maskz_loadu_ps(mask, cos + i), s = _mm512_maskz_loadu_ps(mask, sin + i);
        store_floats(mask, destination + i, _mm512_sub_ps(_mm512_mul_ps(first, c), _mm512_mul_ps(second, s)));
        store_floats(mask, destination + half + i, _mm512_add_ps(_mm512_mul_ps(second, c), _mm512_mul_ps(first, s)));
    }
}

template <class Number>
struct Problem {
    const bf16* query;  // [num_tokens, num_heads, head_dim]: a token's heads lie side by side, tokens the stride apart
    int64_t query_stride;
    const bf16* key;  // [num_tokens, num_kv_heads, head_dim], likewise
    int64_t key_stride;
    const bf16* value;
    int64_t value_stride;
    const float* cos;  // [num_tokens, head_dim / 2], or null
    const float* sin;
    bf16* rotated;  // the queries, without gaps
    Number* pages;  // a token's keys go to pages + slots[token], its values value_offset further
    const int64_t* slots;
    int64_t value_offset;
    float* scales;  // [num_kv_heads] of each go to scales + scale_slots[token], in the same way; null for numbers without
    const int64_t* scale_slots;
    int64_t scale_value_offset;
    int64_t num_tokens, num_heads, num_kv_heads, head_dim;
};

template <class Number>
void rotate_and_store(const Problem<Number>& p) {
    const int64_t half = p.head_dim / 2;
#pragma omp parallel if (p.num_tokens * p.num_heads * p.head_dim >= kMinParallelWork)
    {
        std::vector<bf16> head(p.head_dim);
#pragma omp for schedule(static)
        for (int64_t m = 0; m < p.num_tokens; m++) {
            const float* c = p.cos ? p.cos + m * half : nullptr;
            const float* s = p.sin ? p.sin + m * half : nullptr;
            Number* keys = p.pages + p.slots[m];
            float* scales = has_scales<Number> ? p.scales + p.scale_slots[m] : nullptr;
            for (int64_t h = 0; h < p.num_heads; h++)
                rotate(p.query + m * p.query_stride + h * p.head_dim, c, s, p.rotated + (m * p.num_heads + h) * p.head_dim,
                       p.head_dim);
            for (int64_t h = 0; h < p.num_kv_heads; h++) {
                const int64_t place = h * p.head_dim;
                rotate(p.key + m * p.key_stride + place, c, s, head.data(), p.head_dim);
                store_head(head.data(), keys + place, scales + h, p.head_dim);
                store_head(p.value + m * p.value_stride + place, keys + p.value_offset + place,
                           scales + p.scale_value_offset + h, p.head_dim);
            }
        }
    }
}

}  // namespace
}  // namespace twinpool

// See Problem.
#define TWINPOOL_ROTATE_AND_STORE(name, Number)                                                                              \
    extern "C" void name(const uint16_t* query, int64_t query_stride, const uint16_t* key, int64_t key_stride,               \
                         const uint16_t* value, int64_t value_stride, const float* cos, const float* sin,                    \
                         uint16_t* rotated, void* pages, const int64_t* slots, int64_t value_offset, float* scales,          \
                         const int64_t* scale_slots, int64_t scale_value_offset, int64_t num_tokens, int64_t num_heads,      \
                         int64_t num_kv_heads, int64_t head_dim) {                                                           \
        twinpool::rotate_and_store<Number>({query, query_stride, key, key_stride, value, value_stride, cos, sin, rotated,    \
                                            (Number*)pages, slots, value_offset, scales, scale_slots, scale_value_offset,    \
                                            num_tokens, num_heads, num_kv_heads, head_dim});                                 \
    }

TWINPOOL_ROTATE_AND_STORE(twinpool_rotate_and_store_bfloat16, twinpool::bf16)
TWINPOOL_ROTATE_AND_STORE(twinpool_rotate_and_store_float16, twinpool::float16)
TWINPOOL_ROTATE_AND_STORE(twinpool_rotate_and_store_int8, int8_t)
