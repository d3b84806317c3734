// Rotary embedding of queries and keys, which go on to where they are needed: keys, with their values, into the paged cache.
#include "simd.h"

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

}  // namespace
}  // namespace twinpool

using namespace twinpool;

// query [num_tokens, num_heads, head_dim], key and value [num_tokens, num_kv_heads, head_dim]: a token's heads lie side by
// side, tokens lie the given strides apart. cos and sin [num_tokens, head_dim / 2], or null. rotated, the queries, has no gaps.
// A token's keys go to pages + slots[token], its values lie value_offset further.
extern "C" void twinpool_rotate_and_store(const uint16_t* query, int64_t query_stride, const uint16_t* key,
                                          int64_t key_stride, const uint16_t* value, int64_t value_stride, const float* cos,
                                          const float* sin, uint16_t* rotated, uint16_t* pages, const int64_t* slots,
                                          int64_t value_offset, int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads,
                                          int64_t head_dim) {
#pragma omp parallel for schedule(static) if (num_tokens * num_heads * head_dim >= kMinParallelWork)
    for (int64_t m = 0; m < num_tokens; m++) {
        const float* c = cos ? cos + m * (head_dim / 2) : nullptr;
        const float* s = sin ? sin + m * (head_dim / 2) : nullptr;
        bf16* slot = pages + slots[m];
        for (int64_t h = 0; h < num_heads; h++)
            rotate(query + m * query_stride + h * head_dim, c, s, rotated + (m * num_heads + h) * head_dim, head_dim);
        for (int64_t h = 0; h < num_kv_heads; h++)
            rotate(key + m * key_stride + h * head_dim, c, s, slot + h * head_dim, head_dim);
        std::memcpy(slot + value_offset, value + m * value_stride, num_kv_heads * head_dim * sizeof(bf16));
    }
}
