// Products with a packed weight matrix: y[m][n] = sum over k of weight[n][k] * x[m][k] + bias[n]. The order of the bytes is
// described in packed_weight.py.
//
// A row's result depends on nothing but that row: its sums run in one order however many rows there are. x is bfloat16, sums
// are float32, and y is either.
#include <omp.h>

#include <algorithm>
#include <memory>
#include <type_traits>

#include "packed_layout.h"

namespace twinpool {
namespace {

constexpr int kTileBlocks = 2;  // channels are padded to whole tiles of so many blocks of 16
constexpr int kRows = 6;  // rows computed together for a tile, at most: what the registers hold
constexpr int64_t kBandRows = 16 * kRows;  // rows of a tile that go to one thread: enough for the tile's weights to pay
constexpr int kManyRows = 2 * kRows;  // above so many, Int8 weights are unpacked once a band; Int4 costs next to nothing anyway
constexpr int kFewRows = 2;  // up to so many are computed for two tiles together: sums that do not wait for one another

// A 16-bit lane of register r holds four weights, those of pairs 4r to 4r + 3 from its low bits up.
struct Int4 {
    static constexpr int kBytes = kLanes * kGroup / 2;  // one block of channels, one group
    static constexpr bool kHasScales = true;

    __m512i values;  // the bfloat16 of 0 to 15, twice, since the look-up sees five bits

    Int4() {
        alignas(64) bf16 table[32];
        for (int i = 0; i < 32; i++) {
            const float value = float(i % 16);
            uint32_t bits;
            std::memcpy(&bits, &value, sizeof bits);
            table[i] = bf16(bits >> 16);
        }
        values = _mm512_load_si512(table);
    }

    __m512bh pair(const uint8_t* group, int index) const {
        const __m512i four = _mm512_loadu_si512(group + index / 4 * 64);
        return (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(four, index % 4 * 4), values);
    }
};

struct Int8 {
    static constexpr int kBytes = kLanes * kGroup;
    static constexpr bool kHasScales = true;

    __m512i upper_halves;  // those of 32 floats: the bfloat16 of an integer of eight bits, exactly

    Int8() {
        alignas(64) bf16 places[32];
        for (int i = 0; i < 32; i++) places[i] = 2 * i + 1;
        upper_halves = _mm512_load_si512(places);
    }

    __m512bh pair(const uint8_t* group, int index) const {
        const __m128i* bytes = (const __m128i*)(group + index * 2 * kLanes);
        const __m512 first = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes)));
        const __m512 second = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes + 1)));
        return (__m512bh)_mm512_permutex2var_epi16((__m512i)first, upper_halves, (__m512i)second);
    }
};

struct Bfloat16 {
    static constexpr int kBytes = 2 * kLanes * kGroup;
    static constexpr bool kHasScales = false;

    __m512bh pair(const uint8_t* group, int index) const { return (__m512bh)_mm512_loadu_si512(group + index * 64); }
};

// Int8 weights after unpack().
struct Unpacked : Bfloat16 {
    static constexpr bool kHasScales = true;
};

struct Problem {
    const bf16* x;  // [num_rows, num_groups, kGroup]
    const uint8_t* weights;  // [num_blocks, num_groups, Form::kBytes]
    const float* scales;  // [num_blocks, num_groups, 2 (scale, zero), kLanes]
    const float* bias;  // [num_channels], or null
    const float* sums;  // [num_rows, num_groups]: of x
    void* y;  // [num_rows, num_channels], float or bf16
    bool is_y_float;
    int64_t num_rows, num_groups, num_channels;
};

// y for num_rows rows from first_row on and num_blocks blocks of channels from first_block on, where `weights` begin. In which
// tile a sum is computed does not change it.
template <class Form, int num_rows, int num_blocks>
void compute(const Form& form, const Problem& p, const uint8_t* weights, int64_t first_row, int64_t first_block) {
    const int64_t depth = p.num_groups * kGroup;
    const bf16* x = p.x + first_row * depth;
    __m512 total[num_rows][num_blocks];
    for (int m = 0; m < num_rows; m++)
        for (int b = 0; b < num_blocks; b++) total[m][b] = _mm512_setzero_ps();

    for (int64_t g = 0; g < p.num_groups; g++) {
        __m512 part[num_rows][num_blocks];
        for (int m = 0; m < num_rows; m++)
            for (int b = 0; b < num_blocks; b++) part[m][b] = Form::kHasScales ? _mm512_setzero_ps() : total[m][b];
#pragma GCC unroll 16
        for (int pair = 0; pair < kPairs; pair++) {
            __m512bh weight[num_blocks];
            for (int b = 0; b < num_blocks; b++) weight[b] = form.pair(weights + (b * p.num_groups + g) * Form::kBytes, pair);
            for (int m = 0; m < num_rows; m++) {
                int32_t two;
                std::memcpy(&two, x + m * depth + g * kGroup + 2 * pair, sizeof two);
                const __m512bh both = (__m512bh)_mm512_set1_epi32(two);
                for (int b = 0; b < num_blocks; b++) part[m][b] = _mm512_dpbf16_ps(part[m][b], weight[b], both);
            }
        }
        for (int b = 0; b < num_blocks; b++) {
            if constexpr (Form::kHasScales) {
                const float* of_group = p.scales + ((first_block + b) * p.num_groups + g) * 2 * kLanes;
                const __m512 scale = _mm512_loadu_ps(of_group), zero = _mm512_loadu_ps(of_group + kLanes);
                for (int m = 0; m < num_rows; m++) {
                    const __m512 sum = _mm512_set1_ps(p.sums[(first_row + m) * p.num_groups + g]);
                    total[m][b] = _mm512_fmadd_ps(scale, part[m][b], total[m][b]);
                    total[m][b] = _mm512_fmadd_ps(zero, sum, total[m][b]);
                }
            } else {
                for (int m = 0; m < num_rows; m++) total[m][b] = part[m][b];
            }
        }
    }
    for (int b = 0; b < num_blocks; b++) {
        const int64_t channel = (first_block + b) * kLanes;
        if (channel >= p.num_channels) return;
        const __mmask16 exists = first_lanes(p.num_channels - channel);
        const __m512 bias = p.bias ? _mm512_maskz_loadu_ps(exists, p.bias + channel) : _mm512_setzero_ps();
        for (int m = 0; m < num_rows; m++) {
            const int64_t place = (first_row + m) * p.num_channels + channel;
            const __m512 sum = _mm512_add_ps(total[m][b], bias);
            if (p.is_y_float)
                _mm512_mask_storeu_ps((float*)p.y + place, exists, sum);
            else
                store_floats(exists, (bf16*)p.y + place, sum);
        }
    }
}

template <class Form>
void compute(const Form& form, const Problem& p, const uint8_t* weights, int64_t row, int64_t num_rows, int64_t tile,
             int64_t num_tiles) {
    const int64_t block = tile * kTileBlocks;
    if (num_tiles == 2) {
        if (num_rows == 1) return compute<Form, 1, 2 * kTileBlocks>(form, p, weights, row, block);
        if (num_rows == 2) return compute<Form, 2, 2 * kTileBlocks>(form, p, weights, row, block);
    }
    switch (num_rows) {
        case 1: return compute<Form, 1, kTileBlocks>(form, p, weights, row, block);
        case 2: return compute<Form, 2, kTileBlocks>(form, p, weights, row, block);
        case 3: return compute<Form, 3, kTileBlocks>(form, p, weights, row, block);
        case 4: return compute<Form, 4, kTileBlocks>(form, p, weights, row, block);
        case 5: return compute<Form, 5, kTileBlocks>(form, p, weights, row, block);
        case 6: return compute<Form, 6, kTileBlocks>(form, p, weights, row, block);
    }
}

// Some rows for some tiles of channels. Rows are taken in portions that are as equal as can be: a small one costs as much for
// its weights as a large one.
template <class Form>
void compute_band(const Form& form, const Problem& p, const uint8_t* weights, int64_t row, int64_t end_row, int64_t tile,
                  int64_t num_tiles) {
    for (int64_t num_portions = (end_row - row + kRows - 1) / kRows; row < end_row; num_portions--) {
        const int64_t num_rows = (end_row - row + num_portions - 1) / num_portions;
        compute(form, p, weights, row, num_rows, tile, num_tiles);
        row += num_rows;
    }
}

void unpack(const Int8& form, const uint8_t* weights, int64_t num_groups, __m512i* unpacked) {
    for (int64_t g = 0; g < num_groups; g++)
        for (int pair = 0; pair < kPairs; pair++)
            unpacked[g * kPairs + pair] = (__m512i)form.pair(weights + g * Int8::kBytes, pair);
}

// What one of the threads does: of all bands of rows for the first tile, then for the next and so on, an equal share.
template <class Form>
void compute_share(const Form& form, const Problem& p, int64_t thread, int64_t num_threads) {
    const int64_t num_tiles = (p.num_channels + kTileBlocks * kLanes - 1) / (kTileBlocks * kLanes);
    const int64_t num_bands = (p.num_rows + kBandRows - 1) / kBandRows, num_shared = num_tiles * num_bands;
    const int64_t step = p.num_rows <= kFewRows ? 2 : 1, end = num_shared * (thread + 1) / num_threads;
    const int64_t tile_groups = kTileBlocks * p.num_groups;
    const bool is_unpacked = std::is_same_v<Form, Int8> && p.num_rows > kManyRows;
    const std::unique_ptr<__m512i[]> unpacked(is_unpacked ? new __m512i[tile_groups * kPairs] : nullptr);
    for (int64_t i = num_shared * thread / num_threads; i < end; i += step) {
        const int64_t tile = i / num_bands, row = i % num_bands * kBandRows, end_row = std::min(row + kBandRows, p.num_rows);
        const uint8_t* weights = p.weights + tile * tile_groups * Form::kBytes;
        if constexpr (std::is_same_v<Form, Int8>) {
            if (is_unpacked) {
                unpack(form, weights, tile_groups, unpacked.get());
                compute_band(Unpacked(), p, (const uint8_t*)unpacked.get(), row, end_row, tile, 1);
                continue;
            }
        }
        compute_band(form, p, weights, row, end_row, tile, std::min(step, end - i));
    }
}

void sum_groups(const bf16* x, int64_t num_groups, float* sums) {
    for (int64_t g = 0; g < num_groups; g++) {
        const bf16* group = x + g * kGroup;
        sums[g] = _mm512_reduce_add_ps(_mm512_add_ps(load_floats(0xffff, group), load_floats(0xffff, group + kLanes)));
    }
}

struct Call {
    int64_t num_rows;
    const bf16* x;  // [num_rows, depth]
    const uint8_t* weights;  // this and what follows as in Problem
    const float* scales;
    const float* bias;
    void* y;
    int64_t is_y_float, depth, num_channels;
};

template <class Form>
void multiply(const Call& c) {
    const int64_t num_groups = (c.depth + kGroup - 1) / kGroup;
    const bf16* x = c.x;
    std::unique_ptr<bf16[]> padded;
    if (c.depth % kGroup) {
        padded.reset(new bf16[c.num_rows * num_groups * kGroup]());
        for (int64_t m = 0; m < c.num_rows; m++)
            std::memcpy(&padded[m * num_groups * kGroup], x + m * c.depth, c.depth * sizeof(bf16));
        x = padded.get();
    }
    std::unique_ptr<float[]> sums;
    if (Form::kHasScales) {
        sums.reset(new float[c.num_rows * num_groups]);
        for (int64_t m = 0; m < c.num_rows; m++) sum_groups(x + m * num_groups * kGroup, num_groups, &sums[m * num_groups]);
    }
    const Form form;
    const Problem problem{x,   c.weights,         c.scales,   c.bias,     sums.get(),
                          c.y, c.is_y_float != 0, c.num_rows, num_groups, c.num_channels};
#pragma omp parallel
    compute_share(form, problem, omp_get_thread_num(), omp_get_num_threads());
}

}  // namespace
}  // namespace twinpool

extern "C" void twinpool_linear_int4(const twinpool::Call* call) { twinpool::multiply<twinpool::Int4>(*call); }

extern "C" void twinpool_linear_int8(const twinpool::Call* call) { twinpool::multiply<twinpool::Int8>(*call); }

extern "C" void twinpool_linear_bfloat16(const twinpool::Call* call) { twinpool::multiply<twinpool::Bfloat16>(*call); }
