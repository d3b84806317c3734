// What the attention of both phases has in common.
#pragma once

namespace twinpool {

constexpr int kChunk = 256;  // keys whose scores are weighed together: chunks begin at multiples of it
constexpr float kNever = -1e30f;  // below any score

}  // namespace twinpool
