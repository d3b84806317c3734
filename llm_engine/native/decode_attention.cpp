// Attention of tokens, each over the pages of its own sequence, where they lie: nothing is gathered.
//
// A token's result depends on its sequence alone. Keys are taken in chunks that begin at multiples of a fixed size, and their
// partial results are joined in order, so that neither the other tokens nor the number of threads changes a bit, and a long
// sequence occupies all threads. Scores and sums are float32, the weights of values bfloat16. Where numbers have scales, queries
// and weights become integers of 16 bits: scales of keys multiply the scores, those of values the weights.
#include <omp.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "attention_weights.h"
#include "cached_numbers.h"
#include "fixed_point.h"

namespace twinpool {
namespace {

constexpr int kBlock = 8;  // keys scored together
constexpr int kStretch = 16;  // keys scored for one head after another
constexpr int64_t kMaxHeads = 32;  // query heads of a task, at most, but for those of one key-value head
constexpr int kSummedHeads = 4;  // query heads whose values are summed together, at most: what the registers hold
constexpr int kSlice = 2;  // pieces of a head summed together

template <class Number>
struct Problem {
    int64_t num_tokens;
    const bf16* query;  // [num_tokens, num_heads, head_dim]
    const Number* pages;  // of one layer: page p's keys begin at p * page_stride, its values value_offset further
    const float* scales;  // [page_size, num_kv_heads] of one layer, in the same way; null for numbers without
    const int32_t* page_ids;  // the page tables of all sequences
    const int32_t* tables;  // [num_tokens]: where in page_ids that of the token's sequence begins
    const int32_t* num_keys;  // [num_tokens]
    bf16* output;  // [num_tokens, num_heads, head_dim]
    int64_t num_heads, num_kv_heads, head_dim, page_size, page_stride, value_offset;
    int64_t scale_page_stride, scale_value_offset;
    int64_t window;  // keys that a token attends to, at most
    float scale;
};

// Keys begin to end, of one chunk, of a token; what it gives is the part of this number.
struct Piece {
    int64_t token, begin, end, part;
};

// What a thread computes with, for num_heads heads on num_kv_heads key-value heads.
struct Scratch {
    float (*scores)[kChunk];
    uint16_t (*weights)[kChunk];  // as values are multiplied by
    float (*key_scales)[kChunk];
    float (*value_scales)[kChunk];
    std::vector<uint16_t> query;  // [num_heads, head_dim], where it is integers
    std::vector<float> query_factors;  // [num_heads]: what these are to be multiplied by
    std::vector<float> weight_factors;  // [num_heads]: likewise
    std::vector<Part> parts;

    Scratch(int64_t num_heads, int64_t num_kv_heads, int64_t head_dim)
        : scores(new float[num_heads][kChunk]),
          weights(new uint16_t[num_heads][kChunk]),
          key_scales(new float[num_kv_heads][kChunk]),
          value_scales(new float[num_kv_heads][kChunk]),
          query(num_heads * head_dim),
          query_factors(num_heads, 1.0f),
          weight_factors(num_heads, 1.0f),
          parts(num_heads) {}
    Scratch(const Scratch&) = delete;
    ~Scratch() {
        delete[] scores;
        delete[] weights;
        delete[] key_scales;
        delete[] value_scales;
    }
};

// Where the keys of a piece lie, of the first of some heads, then that of the last again. Values lie value_offset further.
template <class Number>
struct Rows {
    const Number* keys[kChunk + kStretch];

    Rows(const Problem<Number>& p, const Piece& piece, int64_t kv_head) {
        const int32_t* page = p.page_ids + p.tables[piece.token] + piece.begin / p.page_size;
        const int64_t stride = p.num_kv_heads * p.head_dim, count = piece.end - piece.begin;
        int64_t slot = piece.begin % p.page_size;
        for (int64_t i = 0; i < count; page++, slot = 0) {
            const Number* row = p.pages + *page * p.page_stride + slot * stride + kv_head * p.head_dim;
            const int64_t next = std::min(count, i + p.page_size - slot);
            for (; i < next; i++, row += stride) keys[i] = row;
        }
        for (int64_t i = count; i < kChunk + kStretch; i++) keys[i] = keys[count - 1];
    }
};

// The scales of a piece's keys and values, of num_kv_heads heads, [num_kv_heads, kChunk] each.
template <class Number>
void gather_scales(const Problem<Number>& p, const Piece& piece, int64_t kv_head, int64_t num_kv_heads, float (*of_keys)[kChunk],
                   float (*of_values)[kChunk]) {
    const int32_t* page = p.page_ids + p.tables[piece.token] + piece.begin / p.page_size;
    const int64_t count = piece.end - piece.begin;
    int64_t slot = piece.begin % p.page_size;
    for (int64_t i = 0; i < count; page++, slot = 0) {
        const float* scales = p.scales + *page * p.scale_page_stride + slot * p.num_kv_heads + kv_head;
        const int64_t next = std::min(count, i + p.page_size - slot);
        for (; i < next; i++, scales += p.num_kv_heads) {
            for (int64_t h = 0; h < num_kv_heads; h++) {
                of_keys[h][i] = scales[h];
                of_values[h][i] = scales[p.scale_value_offset + h];
            }
        }
    }
}

// The query of num_heads heads as integers, so that no sum of products overflows.
template <class Number>
void make_integers(const Problem<Number>& p, const bf16* query, int64_t num_heads, Scratch& scratch) {
    const float limit = std::min<int64_t>(INT16_MAX, INT32_MAX / (INT8_MAX * p.head_dim));
    for (int64_t h = 0; h < num_heads; h++) {
        const bf16* head = query + h * p.head_dim;
        __m512i largest = _mm512_setzero_si512();
        for (int64_t d = 0; d < p.head_dim; d += kLanes)
            largest = _mm512_max_epu32(largest, (__m512i)_mm512_abs_ps(load_floats(first_lanes(p.head_dim - d), head + d)));
        const FixedPoint integers(largest, limit);
        for (int64_t d = 0; d < p.head_dim; d += kLanes) {
            const __mmask16 mask = first_lanes(p.head_dim - d);
            integers.store(&scratch.query[h * p.head_dim + d], mask, load_floats(mask, head + d));
        }
        scratch.query_factors[h] = integers.factor;
    }
}

// Sums the lanes of each of eight registers.
template <class Number>
inline __m256 sum_lanes(const typename Sums<Number>::Register* rows) {
    __m512 a[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m512 one = (__m512)rows[i], other = (__m512)rows[i + 4];
        a[i] = add_sums<Number>(_mm512_unpacklo_ps(one, other), _mm512_unpackhi_ps(one, other));
    }
    // Lanes of a[i], in each quarter: rows i, i + 4, i, i + 4.
    const __m512 b = add_sums<Number>(_mm512_unpacklo_ps(a[0], a[2]), _mm512_unpackhi_ps(a[0], a[2]));  // 0, 2, 4, 6
    const __m512 c = add_sums<Number>(_mm512_unpacklo_ps(a[1], a[3]), _mm512_unpackhi_ps(a[1], a[3]));  // 1, 3, 5, 7
    const __m512 halves = add_sums<Number>(_mm512_shuffle_f32x4(b, c, 0x44), _mm512_shuffle_f32x4(b, c, 0xee));
    // Quarters: rows of b twice, of c twice.
    const __m512i order = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
    const __m512 sorted = _mm512_permutexvar_ps(order, halves);
    const __m512 sums = add_sums<Number>(sorted, _mm512_shuffle_f32x4(sorted, sorted, 0x4e));
    return _mm512_castps512_ps256(sums_as_floats((typename Sums<Number>::Register)sums));
}

// scores [num_heads, kChunk] of a stretch of keys, from `first` on, for num_heads queries that lie side by side. The keys' head
// lies `offset` further than in rows; its scales are [kChunk], the queries' factors [num_heads].
template <int num_heads, class Number>
void score(const Problem<Number>& p, const uint16_t* query, const float* factors, const Rows<Number>& rows, int64_t offset,
           const float* key_scales, int64_t first, float (*scores)[kChunk]) {
    using Register = typename Sums<Number>::Register;
    for (int64_t k = first; k < first + kStretch; k += kBlock) {
        Register products[num_heads][kBlock];
#pragma GCC unroll 4
        for (int h = 0; h < num_heads; h++)
#pragma GCC unroll 8
            for (int i = 0; i < kBlock; i++) products[h][i] = (Register)_mm512_setzero_si512();
        for (int64_t d = 0; d < p.head_dim; d += kPiece) {
            const __mmask32 mask = first_halves(p.head_dim - d);
            __m512i of_query[num_heads];
#pragma GCC unroll 4
            for (int h = 0; h < num_heads; h++) of_query[h] = _mm512_maskz_loadu_epi16(mask, query + h * p.head_dim + d);
#pragma GCC unroll 8
            for (int i = 0; i < kBlock; i++) {
                const int64_t place = offset + d;
                _mm_prefetch(rows.keys[k + i] + p.value_offset + place, _MM_HINT_T1);
                const __m512i of_key = load_numbers(mask, rows.keys[k + i] + place);
#pragma GCC unroll 4
                for (int h = 0; h < num_heads; h++) products[h][i] = add_products(products[h][i], of_key, of_query[h]);
            }
        }
#pragma GCC unroll 4
        for (int h = 0; h < num_heads; h++) {
            __m256 scale = _mm256_set1_ps(p.scale);
            if (has_scales<Number>)
                scale = _mm256_mul_ps(_mm256_set1_ps(p.scale * factors[h]), _mm256_loadu_ps(key_scales + k));
            _mm256_storeu_ps(scores[h] + k, _mm256_mul_ps(sum_lanes<Number>(products[h]), scale));
        }
    }
}

// The same for all query heads of a key-value head, `group` of them.
template <class Number>
void score_group(const Problem<Number>& p, const uint16_t* query, const float* factors, int64_t group,
                 const Rows<Number>& rows, int64_t offset, const float* key_scales, int64_t first, float (*scores)[kChunk]) {
    for (int64_t h = 0; h < group;) {
        const uint16_t* of_heads = query + h * p.head_dim;
        const int64_t num_left = group - h;
        if (num_left >= 3 && num_left != 4) {
            score<3>(p, of_heads, factors + h, rows, offset, key_scales, first, scores + h);
            h += 3;
        } else if (num_left >= 2) {
            score<2>(p, of_heads, factors + h, rows, offset, key_scales, first, scores + h);
            h += 2;
        } else {
            score<1>(p, of_heads, factors + h, rows, offset, key_scales, first, scores + h);
            h += 1;
        }
    }
}

// The weighted sums of num_pieces pieces of the values, from d on, for num_heads heads, times the factors of the weights. Keys are
// taken in pairs.
template <int num_heads, int num_pieces, class Number>
void sum_values(const Problem<Number>& p, const Rows<Number>& rows, const Rows<Number>& next, int64_t offset, int64_t count,
                const uint16_t (*weights)[kChunk], const float* factors, int64_t d, const Part* parts) {
    using Register = typename Sums<Number>::Register;
    Register sums[num_heads][num_pieces][2];
#pragma GCC unroll 4
    for (int h = 0; h < num_heads; h++)
#pragma GCC unroll 2
        for (int i = 0; i < num_pieces; i++) sums[h][i][0] = sums[h][i][1] = (Register)_mm512_setzero_si512();
    for (int64_t k = 0; k < count; k += 2) {
        const Number* values = rows.keys[k] + p.value_offset + offset + d;
        const Number* next_values = rows.keys[k + 1] + p.value_offset + offset + d;
        __m512i low[num_pieces], high[num_pieces];
#pragma GCC unroll 2
        for (int i = 0; i < num_pieces; i++) {
            const __mmask32 mask = first_halves(p.head_dim - d - i * kPiece);
            _mm_prefetch(next.keys[k] + offset + d + i * kPiece, _MM_HINT_T1);
            _mm_prefetch(next.keys[k + 1] + offset + d + i * kPiece, _MM_HINT_T1);
            const __m512i first = load_numbers(mask, values + i * kPiece);
            const __m512i second = load_numbers(mask, next_values + i * kPiece);
            low[i] = _mm512_unpacklo_epi16(first, second);
            high[i] = _mm512_unpackhi_epi16(first, second);
        }
#pragma GCC unroll 4
        for (int h = 0; h < num_heads; h++) {
            int32_t two;
            std::memcpy(&two, weights[h] + k, sizeof two);
            const __m512i weight = _mm512_set1_epi32(two);
#pragma GCC unroll 2
            for (int i = 0; i < num_pieces; i++) {
                sums[h][i][0] = add_products(sums[h][i][0], low[i], weight);
                sums[h][i][1] = add_products(sums[h][i][1], high[i], weight);
            }
        }
    }
    // low has numbers 0 to 3 of each eight, high 4 to 7
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
#pragma GCC unroll 4
    for (int h = 0; h < num_heads; h++)
#pragma GCC unroll 2
        for (int i = 0; i < num_pieces; i++) {
            float* destination = parts[h].values() + d + i * kPiece;
            __m512 of_low = sums_as_floats(sums[h][i][0]), of_high = sums_as_floats(sums[h][i][1]);
            if (has_scales<Number>) {
                of_low = _mm512_mul_ps(of_low, _mm512_set1_ps(factors[h]));
                of_high = _mm512_mul_ps(of_high, _mm512_set1_ps(factors[h]));
            }
            _mm512_storeu_ps(destination, _mm512_permutex2var_ps(of_low, first, of_high));
            _mm512_storeu_ps(destination + kLanes, _mm512_permutex2var_ps(of_low, second, of_high));
        }
}

template <int num_heads, class Number>
void sum_slices(const Problem<Number>& p, const Rows<Number>& rows, const Rows<Number>& next, int64_t offset, int64_t count,
                const uint16_t (*weights)[kChunk], const float* factors, const Part* parts) {
    int64_t d = 0;
    for (; d + kPiece < p.head_dim; d += kSlice * kPiece)
        sum_values<num_heads, kSlice>(p, rows, next, offset, count, weights, factors, d, parts);
    if (d < p.head_dim) sum_values<num_heads, 1>(p, rows, next, offset, count, weights, factors, d, parts);
}

template <class Number>
void sum_group(const Problem<Number>& p, int64_t group, const Rows<Number>& rows, const Rows<Number>& next, int64_t offset,
               int64_t count, const uint16_t (*weights)[kChunk], const float* factors, const Part* parts) {
    for (int64_t h = 0; h < group;) {
        const int64_t num_heads = std::min<int64_t>(kSummedHeads, group - h);
        switch (num_heads) {
            case 1: sum_slices<1>(p, rows, next, offset, count, weights + h, factors + h, parts + h); break;
            case 2: sum_slices<2>(p, rows, next, offset, count, weights + h, factors + h, parts + h); break;
            case 3: sum_slices<3>(p, rows, next, offset, count, weights + h, factors + h, parts + h); break;
            case 4: sum_slices<4>(p, rows, next, offset, count, weights + h, factors + h, parts + h); break;
        }
        h += num_heads;
    }
}

// All query heads of num_kv_heads key-value heads from the given one on: `memory` is for the parts of all heads of the model.
//
// Memory is the bottleneck, and so is asked for well before it is needed, without a pause: the values of a piece while its keys
// are scored, the keys of the next piece while its values are summed.
template <class Number>
void attend_piece(const Problem<Number>& p, const Piece& piece, int64_t kv_head, const Piece& next_piece, int64_t next_kv_head,
                  int64_t num_kv_heads, Scratch& scratch, float* memory) {
    const int64_t group = p.num_heads / p.num_kv_heads, count = piece.end - piece.begin, part_size = Part::size(p.head_dim);
    const int64_t first_head = kv_head * group, num_heads = num_kv_heads * group;
    const uint16_t* query = p.query + (piece.token * p.num_heads + first_head) * p.head_dim;
    const auto scores = scratch.scores;
    const auto weights = scratch.weights;
    Part* parts = scratch.parts.data();
    const Rows<Number> rows(p, piece, kv_head), next(p, next_piece, next_kv_head);
    if (has_scales<Number>) {
        gather_scales(p, piece, kv_head, num_kv_heads, scratch.key_scales, scratch.value_scales);
        make_integers(p, query, num_heads, scratch);
        query = scratch.query.data();
    }
    const float* query_factors = scratch.query_factors.data();
    float* weight_factors = scratch.weight_factors.data();
    for (int64_t k = 0; k < count; k += kStretch) {
        for (int64_t i = 0; i < num_kv_heads; i++)
            score_group(p, query + i * group * p.head_dim, query_factors + i * group, group, rows, i * p.head_dim,
                        scratch.key_scales[i], k, scores + i * group);
    }
    for (int64_t h = 0; h < num_heads; h++) {
        parts[h].memory = memory + (first_head + h) * part_size;
        if (has_scales<Number>)
            weight_factors[h] = weigh_scaled(scores[h], scratch.value_scales[h / group], count, weights[h], parts[h]);
        else
            weigh(scores[h], count, weights[h], parts[h]);
    }
    for (int64_t i = 0; i < num_kv_heads; i++)
        sum_group(p, group, rows, next, i * p.head_dim, count, weights + i * group, weight_factors + i * group,
                  parts + i * group);
}

// parts: the first of num_parts, `stride` apart.
void join(float* parts, int64_t num_parts, int64_t stride, int64_t head_dim, bf16* output) {
    float top = kNever;
    for (int64_t c = 0; c < num_parts; c++) top = std::max(top, Part{parts + c * stride}.top());
    __m512 sum = _mm512_setzero_ps();
    for (int64_t c = 0; c < num_parts; c++) {
        const Part part{parts + c * stride};
        const __m512 factor = exp_floats(_mm512_set1_ps(part.top() - top));
        sum = _mm512_fmadd_ps(factor, _mm512_set1_ps(part.sum()), sum);
        part.top() = _mm512_cvtss_f32(factor);
    }
    for (int64_t d = 0; d < head_dim; d += kLanes) {
        __m512 value = _mm512_setzero_ps();
        for (int64_t c = 0; c < num_parts; c++) {
            const Part part{parts + c * stride};
            value = _mm512_fmadd_ps(_mm512_set1_ps(part.top()), _mm512_loadu_ps(part.values() + d), value);
        }
        store_floats(first_lanes(head_dim - d), output + d, _mm512_div_ps(value, sum));
    }
}

template <class Number>
void attend(const Problem<Number>& p) {
    std::vector<Piece> pieces;
    std::vector<int64_t> first_pieces(p.num_tokens + 1);
    for (int64_t token = 0; token < p.num_tokens; token++) {
        const int64_t end = p.num_keys[token], begin = std::max<int64_t>(0, end - p.window);
        first_pieces[token] = pieces.size();
        for (int64_t k = begin / kChunk * kChunk; k < end; k += kChunk)
            pieces.push_back({token, std::max(k, begin), std::min(k + kChunk, end), (int64_t)pieces.size()});
    }
    first_pieces[p.num_tokens] = pieces.size();
    // Threads take them in turn, the longest first. So their shares are equal, and none follows a shorter one, which would not
    // leave the time to bring its keys.
    std::stable_sort(pieces.begin(), pieces.end(), [](const Piece& one, const Piece& other) {
        return one.end - one.begin > other.end - other.begin;
    });
    const int64_t group = p.num_heads / p.num_kv_heads, part_size = Part::size(p.head_dim);
    // A key-value head is a task, or where that leaves enough for every thread, as many as fit: they lie side by side.
    const int64_t num_pieces = pieces.size(), num_fitting = std::min(p.num_kv_heads, std::max<int64_t>(1, kMaxHeads / group));
    const int64_t num_together = num_pieces >= 4 * omp_get_max_threads() ? num_fitting : 1;
    const int64_t num_bundles = (p.num_kv_heads + num_together - 1) / num_together, num_tasks = num_pieces * num_bundles;
    const std::unique_ptr<float[]> parts(new float[num_pieces * p.num_heads * part_size]);  // left as it comes
#pragma omp parallel if (num_tasks > 1)
    {
        Scratch scratch(num_together * group, num_together, p.head_dim);
#pragma omp for schedule(static, 1)
        for (int64_t task = 0; task < num_tasks; task++) {
            const int64_t next = std::min(task + omp_get_num_threads(), num_tasks - 1);
            const Piece& piece = pieces[task / num_bundles];
            const int64_t kv_head = task % num_bundles * num_together, next_kv_head = next % num_bundles * num_together;
            attend_piece(p, piece, kv_head, pieces[next / num_bundles], next_kv_head,
                         std::min(num_together, p.num_kv_heads - kv_head), scratch,
                         &parts[piece.part * p.num_heads * part_size]);
        }
#pragma omp for schedule(static)
        for (int64_t task = 0; task < p.num_tokens * p.num_heads; task++) {
            const int64_t token = task / p.num_heads, head = task % p.num_heads, first = first_pieces[token];
            join(&parts[(first * p.num_heads + head) * part_size], first_pieces[token + 1] - first, p.num_heads * part_size,
                 p.head_dim, p.output + task * p.head_dim);
        }
    }
}

}  // namespace
}  // namespace twinpool

extern "C" void twinpool_attend_bfloat16(const twinpool::Problem<twinpool::bf16>* call) { twinpool::attend(*call); }

extern "C" void twinpool_attend_float16(const twinpool::Problem<twinpool::float16>* call) { twinpool::attend(*call); }

extern "C" void twinpool_attend_int8(const twinpool::Problem<int8_t>* call) { twinpool::attend(*call); }
