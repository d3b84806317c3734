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
struct Call {
    int64_t num_tokens;
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
    int64_t num_heads, num_kv_heads, head_dim;
};

template <class Number>
void rotate_and_store(const Call<Number>& c) {
    const int64_t half = c.head_dim / 2;
#pragma omp parallel if (c.num_tokens * c.num_heads * c.head_dim >= kMinParallelWork)
    {
        std::vector<bf16> head(c.head_dim);
#pragma omp for schedule(static)
        for (int64_t m = 0; m < c.num_tokens; m++) {
            const float* cos = c.cos ? c.cos + m * half : nullptr;
            const float* sin = c.sin ? c.sin + m * half : nullptr;
            Number* keys = c.pages + c.slots[m];
            float* scales = has_scales<Number> ? c.scales + c.scale_slots[m] : nullptr;
            for (int64_t h = 0; h < c.num_heads; h++)
                rotate(c.query + m * c.query_stride + h * c.head_dim, cos, sin, c.rotated + (m * c.num_heads + h) * c.head_dim,
                       c.head_dim);
            for (int64_t h = 0; h < c.num_kv_heads; h++) {
                const int64_t place = h * c.head_dim;
                rotate(c.key + m * c.key_stride + place, cos, sin, head.data(), c.head_dim);
                store_head(head.data(), keys + place, scales + h, c.head_dim);
                store_head(c.value + m * c.value_stride + place, keys + c.value_offset + place,
                           scales + c.scale_value_offset + h, c.head_dim);
            }
        }
    }
}

}  // namespace
}  // namespace twinpool

extern "C" void twinpool_rotate_and_store_bfloat16(const twinpool::Call<twinpool::bf16>* call) {
    twinpool::rotate_and_store(*call);
}

extern "C" void twinpool_rotate_and_store_float16(const twinpool::Call<twinpool::float16>* call) {
    twinpool::rotate_and_store(*call);
}

extern "C" void twinpool_rotate_and_store_int8(const twinpool::Call<int8_t>* call) { twinpool::rotate_and_store(*call); }
