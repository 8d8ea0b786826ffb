#include "machine.hpp"

#include <algorithm>
#include <utility>

namespace infinity::test_driver {

Machine::Machine() {
    hosts_[std::thread::id()] = checker_.add("host");
    inline_.is_inline = true;
    inline_.actor = checker_.add("compute");
}

Machine::~Machine() {
    Lock held = lock();
    drain(held);
    while (!streams_.empty()) end_stream(held, streams_.front().get());
}

int Machine::begin(const char* call) {
    ++counts_[call];
    if (log_.size() < most_logged) log_.emplace_back(call);
    return injected(call);
}

int Machine::injected(const char* call) {
    for (auto failure = failures_.begin(); failure != failures_.end(); ++failure) {
        if (failure->call != call || --failure->left > 0) continue;
        const int code = failure->code;
        failures_.erase(failure);
        return code;
    }
    return 0;
}

int Machine::enter(Lock& lock, const char* call) {
    ++calls_;
    const int injected = begin(call);
    if (injected == 0) dawdle(lock);
    return injected;
}

void Machine::dawdle(Lock& lock) {
    if (pace_ == Pace::threads) {
        if (draw(4) == 0) {
            lock.unlock();
            std::this_thread::yield();
            lock.lock();
        }
        return;
    }
    for (std::uint64_t left = draw(eagerness_ + 1); left > 0 && step(); --left) {
    }
}

Stream* Machine::make_stream() {
    auto made = std::make_unique<Stream>();
    Stream* stream = made.get();
    stream->actor = checker_.add("stream " + std::to_string(streams_.size()));
    stream->favour = 1U << (2 * draw(4));
    streams_.push_back(std::move(made));
    if (pace_ == Pace::threads)
        stream->thread = std::thread([this, stream] { thread_main(*stream); });
    return stream;
}

void Machine::end_stream(Lock& lock, Stream* stream) {
    stream->held = false;
    changed_.notify_all();
    until(lock, [&] { return stream->idle(); });
    stream->ending = true;
    changed_.notify_all();
    if (stream->thread.joinable()) {
        lock.unlock();
        stream->thread.join();
        lock.lock();
    }
    streams_.erase(std::find_if(streams_.begin(), streams_.end(),
                                [&](const auto& each) { return each.get() == stream; }));
}

Stream* Machine::find(Stream* stream) {
    if (stream == nullptr) return &inline_;
    for (const auto& each : streams_) {
        if (each.get() == stream) return stream;
    }
    return nullptr;
}

bool Machine::done(Stream& stream) {
    if (!stream.idle()) {
        if (pace_ == Pace::stepped) step();
        return false;
    }
    if (clock_.on() && !clock_.reached(&stream, stream.time)) return false;
    follow(host(), checker_.clock(stream.actor));
    return true;
}

std::shared_ptr<Event> Machine::find(Event* event) {
    const auto found = events_.find(event);
    return found == events_.end() ? nullptr : found->second;
}

Event* Machine::make_event(bool timing) {
    auto made = std::make_shared<Event>();
    made->timing = timing;
    Event* event = made.get();
    events_.emplace(event, std::move(made));
    return event;
}

void Machine::record(Stream& stream, const std::shared_ptr<Event>& event) {
    queued_by_host(stream);
    event->last = std::make_shared<Moment>();
    event->last->clock = checker_.clock(stream.actor);
    if (clock_.on()) event->last->time = stream.time = std::max(stream.time, clock_.now());
    Work work{Work::Kind::record, nullptr, event->last};
    if (stream.is_inline) {
        if (!clock_.on()) event->last->shown_at = calls_ + draw(lateness_ + 1);
        complete(work);
        return;
    }
    queue(stream, std::move(work));
}

void Machine::wait(Lock& lock, Stream& stream, const std::shared_ptr<Event>& event) {
    const std::shared_ptr<Moment> moment = event->last;
    if (moment == nullptr) return;  // as in CUDA, an event that was never recorded has happened
    queued_by_host(stream);
    follow(stream.actor, moment->clock);
    stream.time = std::max(stream.time, moment->time);
    if (stream.is_inline) {
        if (!moment->happened && !clock_.on()) moment->shown_at = calls_ + draw(lateness_ + 1);
        until(lock, [&] { return moment->happened; });
        return;
    }
    queue(stream, {Work::Kind::wait, nullptr, moment});
}

bool Machine::query(const std::shared_ptr<Event>& event) {
    if (!event->done()) {
        if (pace_ == Pace::stepped) step();  // or a caller that asks in a loop would never hear it
        return false;
    }
    if (event->last == nullptr) return true;
    if (calls_ < event->last->shown_at) return false;
    if (clock_.on() && !clock_.reached(event->last.get(), event->last->time)) return false;
    follow(host(), event->last->clock);
    return true;
}

void Machine::run(Stream& stream, const std::vector<Bytes>& uses, const std::string& what,
                  std::function<void()> work) {
    queued_by_host(stream);
    for (const Bytes& each : uses) queued_use(stream, each, what);
    if (stream.is_inline) {
        work();
        return;
    }
    queue(stream, {Work::Kind::run, std::move(work), nullptr});
}

void Machine::queue(Stream& stream, Work work) {
    stream.queue.push_back(std::move(work));
    changed_.notify_all();
    while (clock_.on() && step()) {
    }
}

void Machine::takes(Stream& stream, Resource resource, std::uint64_t nbytes) {
    if (!clock_.on()) return;
    stream.time = clock_.copied(resource, std::max(stream.time, clock_.now()), nbytes);
}

void Machine::takes(Stream& stream, Time length) {
    if (!clock_.on()) return;
    const Time begin = std::max(stream.time, clock_.now());
    stream.time = clock_.computed(Resource::device, begin, length);
}

void Machine::touched(Stream* stream, const Bytes& bytes, const std::string& what) {
    if (stream == nullptr) {
        use(host(), bytes, what);
        return;
    }
    queued_by_host(*stream);
    queued_use(*stream, bytes, what);
}

void Machine::synchronize(Lock& lock) {
    until(lock, [this] {
        return std::none_of(streams_.begin(), streams_.end(),
                            [this](const auto& each) { return each->busy || ready(*each); });
    });
    clock_.wait_until(inline_.time);
    follow(host(), checker_.clock(inline_.actor));
    for (const auto& stream : streams_) {
        clock_.wait_until(stream->time);
        follow(host(), checker_.clock(stream->actor));
    }
}

bool Machine::knows_own_work() {
    const Clock& known = checker_.clock(host());
    const auto knows = [&](const Stream& stream) {
        const auto mine = stream.last_use.find(std::this_thread::get_id());
        if (mine == stream.last_use.end()) return true;
        return stream.actor < known.size() && known[stream.actor] >= mine->second;
    };
    return knows(inline_) && std::all_of(streams_.begin(), streams_.end(),
                                         [&](const auto& each) { return knows(*each); });
}

void Machine::taken_away(std::uint64_t begin, std::uint64_t nbytes, const std::string& what) {
    checker_.use(host(), begin, begin + nbytes, true, what);
}

void Machine::report(std::string violation) {
    const bool known = std::find(reports_.begin(), reports_.end(), violation) != reports_.end();
    if (!known && reports_.size() < Checker::most_kept) reports_.push_back(std::move(violation));
}

void Machine::start_clock(Lock& lock, const VirtualClock::Rates& rates, bool copies) {
    drain(lock);
    clock_.start(rates, copies);
    inline_.time = 0;
    for (auto& stream : streams_) stream->time = 0;
}

void Machine::reset(Lock& lock, std::uint64_t seed, Pace pace) {
    drain(lock);
    clock_.stop();
    failures_.clear();
    counts_.clear();
    log_.clear();
    handed_over_.clear();
    checker_.clear();
    reports_.clear();
    unregistered_copies_ = 0;
    addresses_.forget();
    registered_.forget();
    opened_.forget();
    inline_.last_use.clear();
    for (auto& stream : streams_) stream->last_use.clear();
    separate_threads_ = false;
    blind_ = false;
    random_.seed(seed);
    pace_ = pace;
    eagerness_ = static_cast<unsigned>(draw(4));
    lateness_ = std::uint64_t{1} << (2 * draw(5));
    for (auto& stream : streams_) stream->favour = 1U << (2 * draw(4));
}

void Machine::hold(Stream* stream, bool held) {
    for (auto& each : streams_) {
        if (stream == nullptr || stream == each.get()) each->held = held;
    }
    changed_.notify_all();
}

void Machine::fail(std::string call, int nth, int code) {
    failures_.push_back({std::move(call), nth, code});
}

void Machine::release(std::uint64_t key) {
    const Checker::Actor actor = host();
    HandOver& handed_over = handed_over_[key];
    handed_over.time = std::max(handed_over.time, clock_.now());
    Clock& clock = handed_over.clock;
    const Clock& mine = checker_.clock(actor);
    if (clock.size() < mine.size()) clock.resize(mine.size());
    for (std::size_t each = 0; each < mine.size(); ++each)
        clock[each] = std::max(clock[each], mine[each]);
    checker_.tick(actor);
}

void Machine::acquire(std::uint64_t key) {
    const auto found = handed_over_.find(key);
    if (found == handed_over_.end()) return;
    checker_.follow(host(), found->second.clock);
    clock_.wait_until(found->second.time);
}

std::uint64_t Machine::count(const std::string& call) const {
    const auto found = counts_.find(call);
    return found == counts_.end() ? 0 : found->second;
}

std::vector<std::string> Machine::violations() {
    std::vector<std::string> all = checker_.violations();
    all.insert(all.end(), reports_.begin(), reports_.end());
    const auto written = addresses_.written();
    all.insert(all.end(), written.begin(), written.end());
    return all;
}

std::vector<std::string> Machine::left() const {
    std::vector<std::string> all = registered_.left();
    for (const auto& more : {addresses_.left(), opened_.left()})
        all.insert(all.end(), more.begin(), more.end());
    return all;
}

void Machine::drain(Lock& lock) {
    hold(nullptr, false);
    until(lock, [this] {
        for (const auto& stream : streams_) {
            if (!stream->idle()) return false;
        }
        return true;
    });
}

Checker::Actor Machine::host() {
    const auto key = separate_threads_ ? std::this_thread::get_id() : std::thread::id();
    const auto found = hosts_.find(key);
    if (found != hosts_.end()) return found->second;
    return hosts_[key] = checker_.add("host thread " + std::to_string(hosts_.size()));
}

void Machine::queued_by_host(Stream& stream) {
    const Checker::Actor actor = host();
    checker_.follow(stream.actor, checker_.clock(actor));
    checker_.tick(stream.actor);
    checker_.tick(actor);
}

void Machine::use(Checker::Actor actor, const Bytes& bytes, const std::string& what) {
    const std::uint64_t end = bytes.begin + bytes.nbytes;
    checker_.use(actor, bytes.begin, end, bytes.writes, what);
    if (bytes.writes && opened_.overlaps(bytes.begin, bytes.nbytes))
        report(checker_.described(actor, bytes.begin, end, true, what) + " of another process");
    if (addresses_.kind(bytes.begin, bytes.nbytes) == Addresses::Kind::ordinary) return;
    report(checker_.described(actor, bytes.begin, end, bytes.writes, what) +
           " where only a stand-in is");
}

void Machine::queued_use(Stream& stream, const Bytes& bytes, const std::string& what) {
    use(stream.actor, bytes, what);
    stream.last_use[std::this_thread::get_id()] = checker_.clock(stream.actor)[stream.actor];
}

bool Machine::ready(const Stream& stream) const {
    if (stream.queue.empty() || stream.held || stream.busy) return false;
    const Work& next = stream.queue.front();
    return next.kind != Work::Kind::wait || next.moment->happened;
}

bool Machine::step() {
    unsigned sum = 0;
    for (const auto& stream : streams_) {
        if (!stream->thread.joinable() && ready(*stream)) sum += stream->favour;
    }
    if (sum == 0) return false;
    std::uint64_t drawn = draw(sum);
    for (auto& stream : streams_) {
        if (stream->thread.joinable() || !ready(*stream)) continue;
        if (drawn >= stream->favour) {
            drawn -= stream->favour;
            continue;
        }
        const Work work = std::move(stream->queue.front());
        stream->queue.pop_front();
        complete(work);
        return true;
    }
    return false;
}

void Machine::complete(const Work& work) {
    if (work.run) work.run();
    if (work.kind == Work::Kind::record) {
        work.moment->happened = true;
        work.moment->at = std::chrono::steady_clock::now();
    }
    changed_.notify_all();
}

template <typename Condition>
void Machine::until(Lock& lock, const Condition& condition) {
    while (!condition()) {
        if (!step()) changed_.wait(lock);
    }
}

void Machine::thread_main(Stream& stream) {
    Lock held = lock();
    for (;;) {
        changed_.wait(held, [&] { return stream.ending || ready(stream); });
        if (stream.ending) return;
        const std::uint64_t pause = draw(8);
        stream.busy = true;
        Work work = std::move(stream.queue.front());
        stream.queue.pop_front();
        held.unlock();
        if (pause < 3) std::this_thread::yield();
        if (pause == 7) std::this_thread::sleep_for(std::chrono::microseconds(50));
        if (work.run) work.run();
        work.run = nullptr;
        held.lock();
        complete(work);
        stream.busy = false;
        changed_.notify_all();
    }
}

Machine& machine() {
    static Machine* const one =
        new Machine;  // never destroyed: handles may be given back at the very end
    return *one;
}

}  // namespace infinity::test_driver
