#include "stripe.hpp"

#include <algorithm>
#include <limits>
#include <numeric>

#include "errors.hpp"

namespace infinity::aio {
namespace {

constexpr uint64_t longest_period = 65536;
constexpr uint64_t tebibyte = uint64_t{1} << 40;

}  // namespace

StripeMap::StripeMap(std::vector<uint32_t> weights, uint64_t stripe_bytes, uint64_t base)
    : weights_(std::move(weights)), stripe_bytes_(stripe_bytes), base_(base) {
    const uint64_t total = std::accumulate(weights_.begin(), weights_.end(), uint64_t{0});
    if (weights_.empty() || std::count(weights_.begin(), weights_.end(), 0u) != 0 ||
        total > longest_period)
        throw BadRequest(
            "A volume needs at least one file, each with a weight of at least 1, "
            "adding up to at most 65536.",
            "Give small integer weights in proportion to bandwidth.");
    if (stripe_bytes_ == 0 || stripe_bytes_ > tebibyte)
        throw BadRequest("stripe_bytes is " + std::to_string(stripe_bytes_) + ".",
                         "Give between 1 byte and 1 TiB; a multiple of the block size is fast.");
    if (base_ > tebibyte)
        throw BadRequest("base is " + std::to_string(base_) + ".",
                         "Give between 0 bytes and 1 TiB.");
    std::vector<int64_t> credit(weights_.size());
    std::vector<uint32_t> used(weights_.size());
    for (uint64_t slot = 0; slot < total; ++slot) {
        for (size_t i = 0; i < weights_.size(); ++i) credit[i] += weights_[i];
        const auto most = std::max_element(credit.begin(), credit.end());
        *most -= static_cast<int64_t>(total);
        const auto file = static_cast<uint32_t>(most - credit.begin());
        period_.push_back(file);
        rank_.push_back(used[file]++);
    }
}

std::vector<Extent> StripeMap::extents(uint64_t offset, uint64_t bytes) const {
    // No file's offset is larger than base_ + the volume's.
    const uint64_t most = static_cast<uint64_t>(std::numeric_limits<int64_t>::max()) - base_;
    if (bytes > most || offset > most - bytes)
        throw BadRequest("A range ends beyond 2^63 bytes.", "Give a smaller offset.");
    std::vector<Extent> extents;
    while (bytes > 0) {
        const uint64_t stripe = offset / stripe_bytes_;
        const uint64_t within = offset % stripe_bytes_;
        const uint64_t slot = stripe % period_.size();
        const uint32_t file = period_[slot];
        const uint64_t local = stripe / period_.size() * weights_[file] + rank_[slot];
        const Extent extent{file, base_ + local * stripe_bytes_ + within,
                            std::min(bytes, stripe_bytes_ - within)};
        if (!extents.empty() && extents.back().file == file &&
            extents.back().offset + extents.back().bytes == extent.offset) {
            extents.back().bytes += extent.bytes;
        } else {
            extents.push_back(extent);
        }
        offset += extent.bytes;
        bytes -= extent.bytes;
    }
    return extents;
}

}  // namespace infinity::aio
