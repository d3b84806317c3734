// Attention of prompts: many tokens of a sequence at once, each over the keys up to its own. Source: Dao 2023
// (arXiv:2307.08691), softmax block by block.
//
// The keys and values that a row of the step needs are packed first. Then each task takes some tokens, with the query heads
// that share a key-value head, through all chunks of keys.
//
// A token's result depends on its sequence alone: chunks of keys begin at multiples of a fixed size, what is masked adds exact
// zeros where values are finite, and every sum runs in the order of the keys. A value that is not makes NaN of earlier tokens too
// that are computed with it. Scores and sums are float32, the weights of values bfloat16.
#include <algorithm>
#include <memory>
#include <vector>

#include "attention_chunk.h"
#include "packed_keys.h"

namespace twinpool {
namespace {

constexpr int kRows = 6;  // query rows multiplied together, with up to kBlocks packed blocks: what the registers hold
constexpr int kBlocks = 4;
constexpr int kFewBlocks = kGroup / kLanes;  // what is left is whole groups
constexpr int64_t kTaskRows = 24;  // query rows of a task, unless one token has more heads that share a key-value head
constexpr float kLog2E = 1.44269504f;

template <class Number>
struct Problem {
    const bf16* query;  // [num_tokens, num_heads, head_dim]
    const Number* pages;  // of one layer: page p's keys begin at p * page_stride, its values value_offset further
    const float* scales;  // [page_size, num_kv_heads] of one layer, in the same way; null for numbers without
    const int32_t* page_ids;  // the page tables of all rows of the step
    const int32_t* tables;  // [num_rows]: where in page_ids that of the row begins
    const int32_t* first_tokens;  // [num_rows + 1]: the row's first token, at last the number of all
    const int32_t* num_keys;  // [num_rows]: up to the row's last token, itself among them
    bf16* packed;  // room for all keys and values, those of each row padded to whole groups
    bf16* output;  // [num_tokens, num_heads, head_dim]
    int64_t num_rows, num_heads, num_kv_heads, head_dim, page_size, page_stride, value_offset;
    int64_t scale_page_stride, scale_value_offset;
    int64_t window;  // keys that a token attends to, at most
    float scale;

    int64_t group() const { return num_heads / num_kv_heads; }
    int64_t dim() const { return padded(head_dim, kGroup); }
    int64_t start(int64_t row) const { return num_keys[row] - (first_tokens[row + 1] - first_tokens[row]); }
    int64_t first_key(int64_t position) const { return std::max<int64_t>(0, position + 1 - window); }

    // first: keys of all rows before this one, padded.
    PackedKeys packed_keys(int64_t first, int64_t row, int64_t kv_head) const {
        const int64_t size = padded(num_keys[row], kGroup) * dim();
        bf16* keys = packed + 2 * (first * num_kv_heads * dim() + kv_head * size);
        return {keys, keys + size};
    }

    CachedHead<Number> cached_head(int64_t row, int64_t key, int64_t kv_head) const {
        const int64_t page = page_ids[tables[row] + key / page_size], slot = key % page_size;
        const Number* place = pages + page * page_stride + (slot * num_kv_heads + kv_head) * head_dim;
        CachedHead<Number> head{place, place + value_offset, 1.0f, 1.0f};
        if constexpr (has_scales<Number>) {
            const float* own = scales + page * scale_page_stride + slot * num_kv_heads + kv_head;
            head.key_scale = own[0];
            head.value_scale = own[scale_value_offset];
        }
        return head;
    }
};

// sums[row][block] += x[row] * packed block, over some groups of inputs. The blocks of a group lie block_stride apart, groups
// group_stride; rows of x lie x_stride apart.
template <int num_blocks>
inline void multiply(const bf16* x, int64_t x_stride, const bf16* packed, int64_t block_stride, int64_t group_stride,
                     int64_t num_groups, __m512 (&sums)[kRows][num_blocks]) {
    for (int64_t g = 0; g < num_groups; g++, x += kGroup, packed += group_stride) {
#pragma GCC unroll 16
        for (int pair = 0; pair < kPairs; pair++) {
            __m512bh weight[num_blocks];
            for (int b = 0; b < num_blocks; b++)
                weight[b] = (__m512bh)_mm512_loadu_si512(packed + b * block_stride + pair * 2 * kLanes);
            for (int m = 0; m < kRows; m++) {
                int32_t two;
                std::memcpy(&two, x + m * x_stride + 2 * pair, sizeof two);
                const __m512bh both = (__m512bh)_mm512_set1_epi32(two);
                for (int b = 0; b < num_blocks; b++) sums[m][b] = _mm512_dpbf16_ps(sums[m][b], weight[b], both);
            }
        }
    }
}

// 2 to the power of x, which is at most 0, to 3e-6 of itself; exactly 1 for 0.
inline __m512 power_of_two(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-200.0f), x);  // in this order a NaN stays one
    const __m512 whole = _mm512_roundscale_ps(x, 0);  // to nearest
    const __m512 rest = _mm512_sub_ps(x, whole);
    __m512 sum = _mm512_set1_ps(9.58283e-3f);  // a fit for |rest| <= 0.5
    for (float coefficient : {5.590643e-2f, 2.4024099e-1f, 6.9312419e-1f, 1.0f})
        sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(coefficient));
    return _mm512_scalef_ps(sum, whole);
}

// What a thread computes a task with, for num_rows query rows at most.
struct Scratch {
    std::unique_ptr<bf16[]> query;  // [num_rows, padded head_dim]
    std::unique_ptr<float[]> scores;  // [num_rows, kChunk], as powers of two
    std::unique_ptr<bf16[]> weights;  // [num_rows, kChunk]: 2 to the power of score - top
    std::unique_ptr<float[]> tops;  // [num_rows]: the highest score so far
    std::unique_ptr<float[]> totals;  // [num_rows, kLanes]: of the weights so far, for each lane
    std::unique_ptr<float[]> sums;  // [num_rows, padded head_dim]: of weight * value so far

    Scratch(int64_t num_rows, int64_t dim)
        : query(new bf16[num_rows * dim]),
          scores(new float[num_rows * kChunk]),
          weights(new bf16[num_rows * kChunk]),
          tops(new float[num_rows]),
          totals(new float[num_rows * kLanes]),
          sums(new float[num_rows * dim]) {}
};

// Scores of the keys of num_blocks packed blocks, for all query rows, to [num_rows, kChunk].
template <int num_blocks>
void score(const bf16* query, int64_t num_rows, int64_t dim, float scale, const bf16* keys, float* scores) {
    const __m512 factor = _mm512_set1_ps(scale * kLog2E);
    for (int64_t r = 0; r < num_rows; r += kRows) {
        __m512 products[kRows][num_blocks];
        for (int m = 0; m < kRows; m++)
            for (int b = 0; b < num_blocks; b++) products[m][b] = _mm512_setzero_ps();
        multiply<num_blocks>(query + r * dim, dim, keys, kLanes * dim, kBlockNumbers, dim / kGroup, products);
        for (int m = 0; m < kRows; m++)
            for (int b = 0; b < num_blocks; b++)
                _mm512_storeu_ps(scores + (r + m) * kChunk + b * kLanes, _mm512_mul_ps(products[m][b], factor));
    }
}

// One query row's weights of `count` keys, of which it sees begin to end; the others' are 0. What was summed before, under a
// lower top, is corrected. is_whole: it sees them all.
template <bool is_whole>
void weigh_seen(const float* scores, int64_t count, int64_t begin, int64_t end, int64_t dim, bf16* weights, float& top,
           float* totals, float* sums) {
    const auto seen = [&](int64_t k) -> __mmask16 {
        if (is_whole) return 0xffff;
        return first_lanes(std::max<int64_t>(0, end - k)) & ~first_lanes(std::max<int64_t>(0, begin - k));
    };
    __m512 highest = _mm512_set1_ps(top);
    for (int64_t k = 0; k < count; k += kLanes)
        highest = _mm512_mask_max_ps(highest, seen(k), highest, _mm512_loadu_ps(scores + k));
    const float new_top = _mm512_reduce_max_ps(highest);
    const __m512 factor = power_of_two(_mm512_set1_ps(top - new_top)), subtracted = _mm512_set1_ps(new_top);
    __m512 total = _mm512_mul_ps(_mm512_loadu_ps(totals), factor);
    for (int64_t k = 0; k < count; k += kLanes) {
        const __m512 weight = power_of_two(_mm512_sub_ps(_mm512_loadu_ps(scores + k), subtracted));
        const __m256i rounded = narrowed(_mm512_maskz_mov_ps(seen(k), weight));
        _mm256_storeu_si256((__m256i*)(weights + k), rounded);
        total = _mm512_add_ps(total, widened(rounded));
    }
    _mm512_storeu_ps(totals, total);
    if (new_top != top)
        for (int64_t d = 0; d < dim; d += kLanes)
            _mm512_storeu_ps(sums + d, _mm512_mul_ps(_mm512_loadu_ps(sums + d), factor));
    top = new_top;
}

// Adds weight * value of num_groups groups of keys, for num_blocks blocks of dimensions and all query rows.
template <int num_blocks>
void add_values(const bf16* weights, int64_t num_rows, int64_t dim, const bf16* values, int64_t num_groups, float* sums) {
    for (int64_t r = 0; r < num_rows; r += kRows) {
        __m512 products[kRows][num_blocks];
        for (int m = 0; m < kRows; m++)
            for (int b = 0; b < num_blocks; b++) products[m][b] = _mm512_loadu_ps(sums + (r + m) * dim + b * kLanes);
        multiply<num_blocks>(weights + r * kChunk, kChunk, values, kBlockNumbers, kGroup * dim, num_groups, products);
        for (int m = 0; m < kRows; m++)
            for (int b = 0; b < num_blocks; b++) _mm512_storeu_ps(sums + (r + m) * dim + b * kLanes, products[m][b]);
    }
}

// Some tokens of a row, for one key-value head. A query row is a token with one of the heads that share it.
struct Task {
    int64_t row, kv_head, first_token, num_tokens, first_position;
    PackedKeys packed;
};

template <class Number>
class TaskRun {
  public:
    TaskRun(const Problem<Number>& problem, const Task& task, const Scratch& scratch)
        : p(problem),
          task(task),
          scratch(scratch),
          dim(problem.dim()),
          num_rows(task.num_tokens * problem.group()),
          num_padded(padded(num_rows, kRows)) {}

    void attend() const {
        begin();
        const int64_t first = p.first_key(task.first_position) / kGroup * kGroup;
        const int64_t end = padded(task.first_position + task.num_tokens, kGroup);
        for (int64_t chunk = first / kChunk * kChunk; chunk < end; chunk += kChunk)
            add_chunk(std::max(first, chunk), std::min(end, chunk + kChunk));
        finish();
    }

  private:
    const Problem<Number>& p;
    const Task& task;
    const Scratch& scratch;
    const int64_t dim, num_rows, num_padded;

    // Of a query row in query and output.
    int64_t place(int64_t r) const {
        const int64_t token = task.first_token + r / p.group(), head = task.kv_head * p.group() + r % p.group();
        return (token * p.num_heads + head) * p.head_dim;
    }

    // What pads the query rows to a multiple is zeros, and is not looked at.
    void begin() const {
        std::fill_n(scratch.query.get(), num_padded * dim, 0);
        std::fill_n(scratch.weights.get(), num_padded * kChunk, 0);
        std::fill_n(scratch.tops.get(), num_padded, kNever);
        std::fill_n(scratch.totals.get(), num_padded * kLanes, 0.0f);
        std::fill_n(scratch.sums.get(), num_padded * dim, 0.0f);
        for (int64_t r = 0; r < num_rows; r++)
            std::memcpy(&scratch.query[r * dim], p.query + place(r), p.head_dim * sizeof(bf16));
    }

    // Keys first to end of one chunk, whole groups of them.
    void add_chunk(int64_t first, int64_t end) const {
        const bf16* query = scratch.query.get();
        const bf16* weights = scratch.weights.get();
        const bf16* keys = task.packed.keys + first * dim;
        const bf16* values = task.packed.values + first * dim;
        const int64_t count = end - first;
        int64_t k = 0, d = 0;
        for (; k + kBlocks * kLanes <= count; k += kBlocks * kLanes)
            score<kBlocks>(query, num_padded, dim, p.scale, keys + k * dim, &scratch.scores[k]);
        if (k < count) score<kFewBlocks>(query, num_padded, dim, p.scale, keys + k * dim, &scratch.scores[k]);
        for (int64_t r = 0; r < num_rows; r++) {
            const int64_t position = task.first_position + r / p.group();
            const int64_t seen_begin = p.first_key(position) - first, seen_end = position + 1 - first;
            const auto weigh_keys = seen_begin <= 0 && seen_end >= count ? weigh_seen<true> : weigh_seen<false>;
            weigh_keys(&scratch.scores[r * kChunk], count, seen_begin, seen_end, dim, &scratch.weights[r * kChunk],
                       scratch.tops[r], &scratch.totals[r * kLanes], &scratch.sums[r * dim]);
        }
        for (; d + kBlocks * kLanes <= dim; d += kBlocks * kLanes)
            add_values<kBlocks>(weights, num_padded, dim, values + d * kGroup, count / kGroup, &scratch.sums[d]);
        if (d < dim) add_values<kFewBlocks>(weights, num_padded, dim, values + d * kGroup, count / kGroup, &scratch.sums[d]);
    }

    void finish() const {
        for (int64_t r = 0; r < num_rows; r++) {
            const __m512 total = _mm512_set1_ps(_mm512_reduce_add_ps(_mm512_loadu_ps(&scratch.totals[r * kLanes])));
            for (int64_t d = 0; d < p.head_dim; d += kLanes)
                store_floats(first_lanes(p.head_dim - d), p.output + place(r) + d,
                             _mm512_div_ps(_mm512_loadu_ps(&scratch.sums[r * dim + d]), total));
        }
    }
};

// A group of keys of a row, to be packed for all key-value heads.
struct KeyGroup {
    int64_t row, first_packed, first_key;
};

template <class Number>
void pack_group(const Problem<Number>& p, const KeyGroup& group) {
    const int64_t count = std::min<int64_t>(kGroup, p.num_keys[group.row] - group.first_key);
    CachedHead<Number> heads[kGroup];
    for (int64_t kv_head = 0; kv_head < p.num_kv_heads; kv_head++) {
        for (int64_t i = 0; i < count; i++) heads[i] = p.cached_head(group.row, group.first_key + i, kv_head);
        pack_keys(heads, count, p.head_dim, p.packed_keys(group.first_packed, group.row, kv_head), group.first_key);
    }
}

template <class Number>
void attend(const Problem<Number>& p) {
    const int64_t max_tokens = std::max<int64_t>(1, kTaskRows / p.group());
    std::vector<KeyGroup> groups;
    std::vector<Task> tasks;
    for (int64_t row = 0, first_packed = 0; row < p.num_rows; first_packed += padded(p.num_keys[row], kGroup), row++) {
        const int64_t start = p.start(row), num_tokens = p.num_keys[row] - start;
        for (int64_t key = p.first_key(start) / kGroup * kGroup; key < p.num_keys[row]; key += kGroup)
            groups.push_back({row, first_packed, key});
        for (int64_t token = 0; token < num_tokens; token += max_tokens)
            for (int64_t kv_head = 0; kv_head < p.num_kv_heads; kv_head++)
                tasks.push_back({row, kv_head, p.first_tokens[row] + token, std::min(max_tokens, num_tokens - token),
                                 start + token, p.packed_keys(first_packed, row, kv_head)});
    }
    const int64_t num_groups = groups.size(), num_tasks = tasks.size();
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < num_groups; i++) pack_group(p, groups[i]);
        const Scratch scratch(padded(max_tokens * p.group(), kRows), p.dim());
        // The last tasks of a row are the longest: they come first, so that no thread is left with one at the end.
#pragma omp for schedule(dynamic)
        for (int64_t i = num_tasks - 1; i >= 0; i--) TaskRun<Number>(p, tasks[i], scratch).attend();
    }
}

}  // namespace
}  // namespace twinpool

// See Problem.
#define TWINPOOL_ATTEND_PROMPTS(name, Number)                                                                              \
    extern "C" void name(const uint16_t* query, const void* pages, const float* scales, const int32_t* page_ids,           \
                         const int32_t* tables, const int32_t* first_tokens, const int32_t* num_keys, uint16_t* packed,    \
                         uint16_t* output, int64_t num_rows, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,    \
                         int64_t page_size, int64_t page_stride, int64_t value_offset, int64_t scale_page_stride,          \
                         int64_t scale_value_offset, int64_t window, float scale) {                                        \
        twinpool::attend<Number>({query, (const Number*)pages, scales, page_ids, tables, first_tokens, num_keys, packed,   \
                                  output, num_rows, num_heads, num_kv_heads, head_dim, page_size, page_stride,             \
                                  value_offset, scale_page_stride, scale_value_offset, window, scale});                    \
    }

TWINPOOL_ATTEND_PROMPTS(twinpool_attend_prompts_bfloat16, twinpool::bf16)
TWINPOOL_ATTEND_PROMPTS(twinpool_attend_prompts_float16, twinpool::float16)
TWINPOOL_ATTEND_PROMPTS(twinpool_attend_prompts_int8, int8_t)
