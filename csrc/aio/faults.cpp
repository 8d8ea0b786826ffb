#include "faults.hpp"

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "blocking_transfer.hpp"

namespace infinity::aio {

void Faults::add(FaultRule rule) {
    const std::lock_guard lock(mutex_);
    rules_.push_back({rule, 0});
}

void Faults::clear() {
    const std::lock_guard lock(mutex_);
    rules_.clear();
}

void Faults::release() {
    const std::lock_guard lock(mutex_);
    std::erase_if(rules_, [](const Counted& counted) {
        return counted.rule.action == FaultRule::Action::hold;
    });
    ++releases_;
}

std::array<uint64_t, kinds> Faults::calls() const {
    const std::lock_guard lock(mutex_);
    return calls_;
}

uint64_t Faults::fired() const {
    const std::lock_guard lock(mutex_);
    return fired_;
}

uint64_t Faults::releases() const {
    const std::lock_guard lock(mutex_);
    return releases_;
}

std::vector<FaultRule> Faults::next(Kind kind, const std::string& path) {
    const std::lock_guard lock(mutex_);
    ++calls_[static_cast<size_t>(kind)];
    std::vector<FaultRule> acting;
    for (Counted& counted : rules_) {
        if (counted.rule.kind && *counted.rule.kind != kind) continue;
        if (counted.rule.path && *counted.rule.path != path) continue;
        ++counted.seen;
        if (counted.seen < counted.rule.nth) continue;
        if (counted.seen - counted.rule.nth >= counted.rule.times) continue;
        ++fired_;
        acting.push_back(counted.rule);
    }
    return acting;
}

namespace {

constexpr std::chrono::milliseconds look_interval{1};  // between looks for releases

class Faulty final : public Backend {
  public:
    Faulty(std::unique_ptr<Backend> inner, std::shared_ptr<Faults> faults)
        : inner_(std::move(inner)), faults_(std::move(faults)) {}

    const char* name() const override { return inner_->name(); }
    void start() override { inner_->start(); }
    void submit(Transfer& transfer) override;
    void wait(TimePoint until, bool wakeable, std::vector<Completion>& done) override;
    void wake() override { inner_->wake(); }
    void expedite() override;
    bool attach(File& file) override { return inner_->attach(file); }
    void detach(File& file) override { inner_->detach(file); }
    std::string register_buffer(std::byte* address, size_t bytes) override {
        return inner_->register_buffer(address, bytes);
    }
    std::string features() const override { return inner_->features(); }

  private:
    struct Held {
        Transfer* transfer;
        TimePoint due;
        uint64_t releases;             // the transfer waits for more releases than these
        std::vector<FaultRule> rules;  // the rules that act on the transfer afterwards
    };

    // What the recording knows of a transfer in flight.
    struct Recorded {
        uint64_t ticket;
        std::shared_ptr<const std::vector<std::byte>> data;
    };

    void release(Transfer& transfer, const std::vector<FaultRule>& rules);
    void record(const Transfer& transfer);
    void record_end(const Completion& completion);

    std::unique_ptr<Backend> inner_;
    std::shared_ptr<Faults> faults_;
    std::vector<Held> held_;
    std::vector<Completion> ready_;  // completed by this backend, never seen by the inner one
    std::unordered_map<const Transfer*, Recorded> recorded_;
};

void Faulty::submit(Transfer& transfer) {
    record(transfer);
    const uint64_t releases = faults_->releases();  // before the rules: a release may come between
    std::vector<FaultRule> rules = faults_->next(transfer.kind, transfer.file->path());
    std::chrono::nanoseconds delay{0};
    bool hold = false;
    for (const FaultRule& rule : rules) {
        if (rule.action == FaultRule::Action::delay) delay = std::max(delay, rule.delay);
        hold = hold || rule.action == FaultRule::Action::hold;
    }
    if (hold) {
        held_.push_back({&transfer, TimePoint::max(), releases, std::move(rules)});
    } else if (delay.count() > 0) {
        held_.push_back({&transfer, Clock::now() + delay, releases, std::move(rules)});
    } else {
        release(transfer, rules);
    }
}

void Faulty::release(Transfer& transfer, const std::vector<FaultRule>& rules) {
    for (const FaultRule& rule : rules) {
        if (rule.action == FaultRule::Action::fail) {
            ready_.push_back({&transfer, -rule.error});
            return;
        }
        if (rule.action == FaultRule::Action::shorten && transfer.kind != Kind::sync) {
            // The transfer is made truly short: exactly this many bytes move. It is buffered,
            // because O_DIRECT would refuse the length.
            const uint32_t bytes = std::min(rule.bytes, transfer.bytes);
            ready_.push_back({&transfer, bytes == 0 ? 0 : transfer_now(transfer, bytes, false)});
            return;
        }
        if (rule.action == FaultRule::Action::tear && transfer.kind == Kind::write) {
            // A disk that lies: it says that all bytes are written.
            const uint32_t bytes = std::min(rule.bytes, transfer.bytes);
            const int64_t moved = bytes == 0 ? 0 : transfer_now(transfer, bytes, false);
            ready_.push_back({&transfer, moved < 0 ? moved : transfer.bytes});
            return;
        }
    }
    inner_->submit(transfer);
}

void Faulty::wait(TimePoint until, bool, std::vector<Completion>& done) {
    const TimePoint now = Clock::now();
    const uint64_t releases = faults_->releases();
    for (size_t i = 0; i < held_.size();) {
        const bool until_released = held_[i].due == TimePoint::max();
        if (until_released ? held_[i].releases == releases : held_[i].due > now) {
            // A release does not wake the engine, so the engine looks for one.
            until = std::min(until, until_released ? now + look_interval : held_[i].due);
            ++i;
            continue;
        }
        const Held due = std::move(held_[i]);
        held_.erase(held_.begin() + static_cast<std::ptrdiff_t>(i));
        release(*due.transfer, due.rules);
    }
    if (!ready_.empty()) until = TimePoint::min();
    const size_t before = done.size();
    done.insert(done.end(), ready_.begin(), ready_.end());
    ready_.clear();
    inner_->wait(until, true, done);
    for (size_t i = before; i < done.size(); ++i) record_end(done[i]);
}

// The memory of a write is read now, and again when the write has ended. In between the kernel may
// read it at any moment, so it must not change.
void Faulty::record(const Transfer& transfer) {
    if (transfer.kind == Kind::read || !faults_->recording().on()) return;
    Event event;
    event.kind = verb(transfer.kind);
    event.path = transfer.file->path();
    event.offset = transfer.offset;
    if (transfer.kind == Kind::write)
        event.data = std::make_shared<const std::vector<std::byte>>(
            transfer.address, transfer.address + transfer.bytes);
    Recorded recorded{0, event.data};
    recorded.ticket = faults_->recording().begin(std::move(event));
    if (recorded.ticket != 0) recorded_[&transfer] = std::move(recorded);
}

void Faulty::record_end(const Completion& completion) {
    const auto found = recorded_.find(completion.transfer);
    if (found == recorded_.end()) return;
    const auto& [ticket, data] = found->second;
    const bool changed =
        data && std::memcmp(data->data(), completion.transfer->address, data->size()) != 0;
    faults_->recording().end(ticket, completion.result, changed);
    recorded_.erase(found);
}

void Faulty::expedite() {
    for (Held& held : held_) held.due = TimePoint::min();
    inner_->expedite();
}

}  // namespace

std::unique_ptr<Backend> make_faulty(std::unique_ptr<Backend> inner,
                                     std::shared_ptr<Faults> faults) {
    return std::make_unique<Faulty>(std::move(inner), std::move(faults));
}

}  // namespace infinity::aio
