// How packed matrices lie in memory, see packed_weight.py: blocks of 16 channels and a group of inputs, which lie in pairs.
#pragma once

#include "simd.h"

namespace twinpool {

constexpr int kGroup = 32;  // inputs that lie together; weights that share a scale and a zero
constexpr int kPairs = kGroup / 2;
constexpr int kBlockNumbers = kLanes * kGroup;

inline int64_t padded(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }

}  // namespace twinpool
