// Chooses a token from each row of logits: what sampler.sample says, row by row. A row's result depends on that row alone.
//
// Nothing sorts the vocabulary. The maxima of small blocks give a bound that at least so many logits reach; only those are
// gathered, and halved by their probability until the token is found.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "simd.h"

namespace twinpool {
namespace {

constexpr float kRuledOut = -std::numeric_limits<float>::infinity();
constexpr int kBlockRows = 16;  // registers whose lanes' maxima are kept: a maximum stands for so many logits
constexpr int64_t kNumSorted = 16;  // so few candidates are sorted instead of halved once more
constexpr int64_t kNumLikely = 512;  // candidates gathered at first, at least
constexpr int kWide = 8;  // doubles in a register
constexpr int64_t kNotFinite = -1, kAllBanned = -2;  // instead of a token

// What native_sampler.py packs. Ids lie in this order from ids_begin on: prompt, answer, biased, banned.
struct Row {
    double temperature, top_p, min_p_drop, number, repetition, presence, frequency, banning_bias;
    int64_t top_k, num_logprobs, ids_begin, num_prompt, num_output, num_biases, num_banned, biases_begin;
};

struct Candidate {
    double weight;  // exp((logit - highest) / temperature)
    float logit;
    int32_t id;

    bool operator<(const Candidate& other) const { return logit > other.logit || (logit == other.logit && id < other.id); }
};

// e to the power of x in double precision, for x of at most 0; 0 below -708.
inline __m512d exp_doubles(__m512d x) {
    const __mmask8 is_tiny = _mm512_cmp_pd_mask(x, _mm512_set1_pd(-708.0), _CMP_LT_OS);
    const __m512d power = _mm512_roundscale_pd(_mm512_mul_pd(x, _mm512_set1_pd(1.4426950408889634)), 0);
    __m512d rest = _mm512_fnmadd_pd(power, _mm512_set1_pd(0.693147180369123816490), x);
    rest = _mm512_fnmadd_pd(power, _mm512_set1_pd(1.90821492927058770002e-10), rest);
    // the series 1/13! ... 1/0!
    __m512d sum = _mm512_set1_pd(1.0 / 6227020800.0);
    for (double divisor :
         {479001600.0, 39916800.0, 3628800.0, 362880.0, 40320.0, 5040.0, 720.0, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0})
        sum = _mm512_fmadd_pd(sum, rest, _mm512_set1_pd(1.0 / divisor));
    return _mm512_maskz_mov_pd(_knot_mask8(is_tiny), _mm512_scalef_pd(sum, power));
}

// The highest logit and the maxima of blocks. A logit that is not a number makes nothing of this usable.
struct Survey {
    float highest = kRuledOut;
    bool is_finite = true;
    std::vector<float> maxima;

    void take(const float* logits, int64_t size) {
        maxima.clear();
        __mmask16 odd = 0;
        for (int64_t begin = 0; begin < size; begin += kBlockRows * kLanes) {
            __m512 block = _mm512_set1_ps(kRuledOut);
            const int64_t end = std::min<int64_t>(size, begin + kBlockRows * kLanes);
            for (int64_t i = begin; i < end; i += kLanes) {
                const __mmask16 mask = first_lanes(end - i);
                const __m512 values = _mm512_maskz_loadu_ps(mask, logits + i);
                odd |= _mm512_fpclass_ps_mask(values, 0x99);  // quiet and signalling NaN, both infinities
                block = _mm512_mask_max_ps(block, mask, block, values);
            }
            const size_t place = maxima.size();
            maxima.resize(place + kLanes);
            _mm512_storeu_ps(maxima.data() + place, block);
        }
        is_finite = odd == 0;
        highest = *std::max_element(maxima.begin(), maxima.end());
    }
};

// The sum of exp((logit - highest) / temperature) over the logits that reach `lowest`.
double sum_weights(const float* logits, int64_t size, double highest, double temperature, float lowest) {
    __m512d sums[2] = {_mm512_setzero_pd(), _mm512_setzero_pd()};
    for (int64_t i = 0; i < size; i += 2 * kWide) {
        const __m512 values = _mm512_mask_loadu_ps(_mm512_set1_ps(kRuledOut), first_lanes(size - i), logits + i);
        const __mmask16 is_kept = _mm512_cmp_ps_mask(values, _mm512_set1_ps(lowest), _CMP_GE_OQ);
        if (!is_kept) continue;
        const __m512d halves[2] = {_mm512_cvtps_pd(_mm512_castps512_ps256(values)),
                                   _mm512_cvtps_pd(_mm512_extractf32x8_ps(values, 1))};
        for (int h = 0; h < 2; h++) {
            const __m512d x = _mm512_div_pd(_mm512_sub_pd(halves[h], _mm512_set1_pd(highest)), _mm512_set1_pd(temperature));
            sums[h] = _mm512_mask_add_pd(sums[h], is_kept >> h * kWide, sums[h], exp_doubles(x));
        }
    }
    return _mm512_reduce_add_pd(_mm512_add_pd(sums[0], sums[1]));
}

// What a thread computes with.
struct Scratch {
    std::vector<float> logits, order;
    std::vector<int32_t> counts;  // zero between two rows
    std::vector<Candidate> candidates;
    Survey survey;
};

// All tokens that reach both bounds, in no order.
void gather(const float* logits, int64_t size, float bound, float lowest, std::vector<Candidate>& candidates) {
    const float least = std::max(bound, lowest);
    candidates.clear();
    for (int64_t i = 0; i < size; i += kLanes) {
        const __mmask16 mask = first_lanes(size - i);
        const __m512 values = _mm512_maskz_loadu_ps(mask, logits + i);
        uint32_t found = _mm512_mask_cmp_ps_mask(mask, values, _mm512_set1_ps(least), _CMP_GE_OQ);
        for (; found; found &= found - 1) {
            const int64_t id = i + __builtin_ctz(found);
            candidates.push_back({0.0, logits[id], int32_t(id)});
        }
    }
}

// A bound that at least `count` logits reach, or the lowest of all where so many blocks are not there.
float bound_of(Scratch& scratch, int64_t count) {
    const std::vector<float>& maxima = scratch.survey.maxima;
    if (count > int64_t(maxima.size())) return kRuledOut;
    scratch.order = maxima;
    std::nth_element(scratch.order.begin(), scratch.order.begin() + count - 1, scratch.order.end(), std::greater<float>());
    return scratch.order[count - 1];
}

int64_t first_id_of(const float* logits, int64_t size, float value) {
    for (int64_t i = 0; i < size; i += kLanes) {
        const __mmask16 mask = first_lanes(size - i);
        const __m512 values = _mm512_maskz_loadu_ps(mask, logits + i);
        const __mmask16 found = _mm512_mask_cmp_ps_mask(mask, values, _mm512_set1_ps(value), _CMP_EQ_OQ);
        if (found) return i + __builtin_ctz(found);
    }
    return 0;  // cannot be: the value is one of them
}

// Gives each its weight, and drops those without any.
void weigh(std::vector<Candidate>& candidates, double highest, double temperature) {
    const size_t size = candidates.size();
    for (size_t first = 0; first < size; first += kWide) {
        const size_t count = std::min<size_t>(kWide, size - first);
        double numbers[kWide] = {};
        for (size_t i = 0; i < count; i++) numbers[i] = candidates[first + i].logit;
        const __m512d below = _mm512_sub_pd(_mm512_loadu_pd(numbers), _mm512_set1_pd(highest));
        _mm512_storeu_pd(numbers, exp_doubles(_mm512_div_pd(below, _mm512_set1_pd(temperature))));
        for (size_t i = 0; i < count; i++) candidates[first + i].weight = numbers[i];
    }
    const auto is_weightless = [](const Candidate& candidate) { return candidate.weight == 0.0; };
    candidates.erase(std::remove_if(candidates.begin(), candidates.end(), is_weightless), candidates.end());
}

double sum_of(const Candidate* begin, const Candidate* end) {
    return std::accumulate(begin, end, 0.0, [](double sum, const Candidate& candidate) { return sum + candidate.weight; });
}

// A place in the order of falling probability, and the sum of all weights up to it.
struct Place {
    int32_t id;
    double sum;
};

// The first place whose sum `is_enough`, in candidates that are in no order yet; where rounding leaves none, the last.
template <typename Predicate>
Place find_place(std::vector<Candidate>& candidates, Predicate is_enough) {
    Candidate *begin = candidates.data(), *end = begin + candidates.size();
    double before = 0.0;
    while (end - begin > kNumSorted) {
        Candidate* middle = begin + (end - begin) / 2;
        std::nth_element(begin, middle, end);
        const double half = before + sum_of(begin, middle);
        if (is_enough(half)) {
            end = middle;
        } else {
            before = half;
            begin = middle;
        }
    }
    std::sort(begin, end);
    Place place{begin->id, before};
    for (; begin < end; begin++) {
        place = {begin->id, place.sum + begin->weight};
        if (is_enough(place.sum)) break;
    }
    return place;
}

// A token of the row that was surveyed.
int64_t draw(const Row& row, const float* logits, int64_t size, Scratch& scratch) {
    const double highest = scratch.survey.highest;
    const float lowest = float(highest + row.min_p_drop);
    const int64_t num_kept = row.top_k ? std::min(row.top_k, size) : size;
    std::vector<Candidate>& candidates = scratch.candidates;
    double mass = num_kept < size ? 0.0 : sum_weights(logits, size, highest, row.temperature, lowest);
    const int64_t num_first = std::max(kNumLikely, num_kept < size ? num_kept : 0);
    const int64_t num_next = scratch.survey.maxima.size() / 4 * 3;
    for (int64_t num_wanted : {num_first, std::max(num_first, num_next), size}) {
        const float bound = bound_of(scratch, num_wanted);
        gather(logits, size, bound, lowest, candidates);
        // What was not gathered is cut off by top_k or min_p, or there is nothing more.
        const bool is_whole = int64_t(candidates.size()) >= num_kept || bound <= lowest;
        if (int64_t(candidates.size()) > num_kept) {
            std::nth_element(candidates.begin(), candidates.begin() + num_kept, candidates.end());
            candidates.resize(num_kept);
        }
        weigh(candidates, highest, row.temperature);
        const double gathered = sum_of(candidates.data(), candidates.data() + candidates.size());
        if (num_kept < size) mass = gathered;
        if (!is_whole && gathered <= (row.top_p < 1.0 ? row.top_p : row.number) * mass) continue;
        double head = mass;
        if (row.top_p < 1.0) head = find_place(candidates, [&](double sum) { return sum >= row.top_p * mass; }).sum;
        return find_place(candidates, [&](double sum) { return sum > row.number * head; }).id;
    }
    return kAllBanned;  // cannot be: the last turn has everything
}

bool is_token(int32_t id, int64_t size) { return id >= 0 && id < size; }

void put(float* logits, int32_t id, double value) {
    constexpr double largest = std::numeric_limits<float>::max();
    logits[id] = float(std::min(std::max(value, -largest), largest));
}

// Penalties, then biases, then bans, as in logit_rules.py.
void apply_rules(const Row& row, const int32_t* ids, const double* biases, float* logits, int64_t size,
                 std::vector<int32_t>& counts) {
    const int32_t *prompt = ids + row.ids_begin, *output = prompt + row.num_prompt;
    const int32_t *biased = output + row.num_output, *banned = biased + row.num_biases;
    counts.resize(std::max<size_t>(counts.size(), size));
    if (row.repetition != 1.0) {
        // A count of -1 marks a token as done.
        for (const int32_t* id = prompt; id < biased; id++) {
            if (!is_token(*id, size) || counts[*id]) continue;
            counts[*id] = -1;
            const double value = logits[*id];
            put(logits, *id, value > 0.0 ? value / row.repetition : value * row.repetition);
        }
        for (const int32_t* id = prompt; id < biased; id++)
            if (is_token(*id, size)) counts[*id] = 0;
    }
    if (row.presence != 0.0 || row.frequency != 0.0) {
        for (const int32_t* id = output; id < biased; id++)
            if (is_token(*id, size)) counts[*id]++;
        for (const int32_t* id = output; id < biased; id++) {
            if (!is_token(*id, size) || !counts[*id]) continue;
            put(logits, *id, double(logits[*id]) - row.presence - row.frequency * counts[*id]);
            counts[*id] = 0;
        }
    }
    for (int64_t i = 0; i < row.num_biases; i++) {
        if (!is_token(biased[i], size)) continue;
        const double bias = biases[row.biases_begin + i];
        put(logits, biased[i], double(logits[biased[i]]) + bias);
        if (bias <= row.banning_bias) logits[biased[i]] = kRuledOut;
    }
    for (int64_t i = 0; i < row.num_banned; i++)
        if (is_token(banned[i], size)) logits[banned[i]] = kRuledOut;
}

// `logits` was surveyed and is as the model computed it. Returns what to take off a logit for its logprob.
double list_likeliest(const float* logits, int64_t size, int64_t count, Scratch& scratch, int32_t* top_ids,
                      double* top_logprobs) {
    const double highest = scratch.survey.highest;
    const double log_total = highest + std::log(sum_weights(logits, size, highest, 1.0, kRuledOut));
    count = std::min(count, size);
    if (count == 0) return log_total;
    gather(logits, size, bound_of(scratch, count), kRuledOut, scratch.candidates);
    std::partial_sort(scratch.candidates.begin(), scratch.candidates.begin() + count, scratch.candidates.end());
    for (int64_t i = 0; i < count; i++) {
        top_ids[i] = scratch.candidates[i].id;
        top_logprobs[i] = double(scratch.candidates[i].logit) - log_total;
    }
    return log_total;
}

int64_t choose(const Row& row, const float* logits, int64_t size, const int32_t* ids, const double* biases, Scratch& scratch,
               double* logprob, int32_t* top_ids, double* top_logprobs) {
    Survey& survey = scratch.survey;
    survey.take(logits, size);
    if (!survey.is_finite) return kNotFinite;
    const bool has_logprobs = row.num_logprobs >= 0;
    const double log_total =
        has_logprobs ? list_likeliest(logits, size, row.num_logprobs, scratch, top_ids, top_logprobs) : 0.0;
    const float* allowed = logits;
    if (row.num_prompt + row.num_output + row.num_biases + row.num_banned) {
        scratch.logits.assign(logits, logits + size);
        apply_rules(row, ids, biases, scratch.logits.data(), size, scratch.counts);
        allowed = scratch.logits.data();
        survey.take(allowed, size);
    }
    if (survey.highest == kRuledOut) return kAllBanned;
    const int64_t token =
        row.temperature == 0.0 ? first_id_of(allowed, size, survey.highest) : draw(row, allowed, size, scratch);
    if (has_logprobs) *logprob = double(logits[token]) - log_total;
    return token;
}

}  // namespace
}  // namespace twinpool

using namespace twinpool;

// logits [num_rows, size]. tokens [num_rows]: a token's id, kNotFinite or kAllBanned. logprobs [num_rows], top_ids and
// top_logprobs [num_rows, max_top], of those rows that asked for them.
extern "C" void twinpool_sample(const float* logits, const Row* rows, const int32_t* ids, const double* biases, int64_t* tokens,
                                double* logprobs, int32_t* top_ids, double* top_logprobs, int64_t num_rows, int64_t size,
                                int64_t max_top) {
#pragma omp parallel if (num_rows * size >= kMinParallelWork)
    {
        Scratch scratch;
#pragma omp for schedule(dynamic)
        for (int64_t m = 0; m < num_rows; m++)
            tokens[m] = choose(rows[m], logits + m * size, size, ids, biases, scratch, logprobs + m, top_ids + m * max_top,
                               top_logprobs + m * max_top);
    }
}
