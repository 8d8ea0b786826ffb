// The map of a volume's bytes to the several files that it lies in.
#pragma once

#include <cstdint>
#include <vector>

namespace infinity::aio {

// A part of a volume's range that is contiguous in one file.
struct Extent {
    uint32_t file = 0;
    uint64_t offset = 0;  // bytes, in that file
    uint64_t bytes = 0;
};

// [Note: striping]
// A volume is a sequence of stripes of `stripe_bytes`. A period has as many stripes as the sum of
// the weights. weights[i] of them lie in file i, and they are spread as evenly as possible (smooth
// weighted round-robin, ties to the lower file). Each file holds its stripes in order without gaps,
// from byte `base` of the file on: what lies before is not the volume's (a slab's header). The map
// follows from (weights, stripe_bytes, base) alone, and a manifest stores the first two. So the
// algorithm is part of the file format.
class StripeMap {
  public:
    // base: bytes of every file before its first stripe. Throws BadRequest.
    StripeMap(std::vector<uint32_t> weights, uint64_t stripe_bytes, uint64_t base = 0);

    const std::vector<uint32_t>& weights() const { return weights_; }
    uint64_t stripe_bytes() const { return stripe_bytes_; }
    uint64_t base() const { return base_; }
    // The file of each stripe of a period.
    const std::vector<uint32_t>& period() const { return period_; }

    // Extents in the volume's order. Neighbours in one file are merged.
    std::vector<Extent> extents(uint64_t offset, uint64_t bytes) const;

  private:
    std::vector<uint32_t> weights_;
    uint64_t stripe_bytes_;
    uint64_t base_;
    std::vector<uint32_t> period_;
    std::vector<uint32_t> rank_;  // of each stripe, among the stripes of its file in the period
};

}  // namespace infinity::aio
