#include "recording.hpp"

#include <utility>

namespace infinity::aio {

void Recording::start() { on_ = true; }

void Recording::clear() {
    std::deque<Event> dropped;  // declared before the lock, so that it is freed after it
    const std::lock_guard lock(mutex_);
    on_ = false;
    first_ticket_ += events_.size();
    std::swap(dropped, events_);
}

uint64_t Recording::begin(Event event) {
    const std::lock_guard lock(mutex_);
    if (!on_) return 0;
    event.submitted = ++clock_;
    events_.push_back(std::move(event));
    return first_ticket_ + events_.size() - 1;
}

Event* Recording::find(uint64_t ticket) {
    if (ticket < first_ticket_ || ticket - first_ticket_ >= events_.size()) return nullptr;
    return &events_[ticket - first_ticket_];
}

void Recording::end(uint64_t ticket, int64_t result, bool changed) {
    const std::lock_guard lock(mutex_);
    Event* event = find(ticket);
    if (event == nullptr || event->completed) return;
    event->completed = ++clock_;
    event->result = result;
    event->changed = changed;
}

void Recording::end(uint64_t ticket) {
    const std::lock_guard lock(mutex_);
    Event* event = find(ticket);
    if (event == nullptr || event->completed) return;
    event->completed = ++clock_;
    event->result = event->data ? static_cast<int64_t>(event->data->size()) : 0;
}

std::vector<Event> Recording::events() const {
    const std::lock_guard lock(mutex_);
    return {events_.begin(), events_.end()};
}

}  // namespace infinity::aio
