// Requests in the order in which their blocks go out: the earliest deadline first.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "request.hpp"

namespace infinity::aio {

// A heap of requests, not of blocks. A request of a terabyte is one entry, and blocks are cut off
// it as slots come free. A request with an earlier deadline overtakes it between two blocks.
class DeadlineQueue {
  public:
    bool empty() const { return heap_.empty(); }
    size_t size() const { return heap_.size(); }
    Request* top() const { return heap_.front(); }

    void push(Request* request) {
        request->queued = true;
        heap_.push_back(request);
        std::push_heap(heap_.begin(), heap_.end(), later);
    }

    Request* pop() {
        std::pop_heap(heap_.begin(), heap_.end(), later);
        Request* request = heap_.back();
        heap_.pop_back();
        request->queued = false;
        return request;
    }

  private:
    static bool later(const Request* a, const Request* b) {
        if (a->deadline != b->deadline) return a->deadline > b->deadline;
        return a->sequence > b->sequence;
    }

    std::vector<Request*> heap_;
};

}  // namespace infinity::aio
