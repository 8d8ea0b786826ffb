// A device whose memory is RAM and whose streams run late.
//
// [Note: how streams run]
// `Pace::stepped`: work runs only inside calls, on the calling thread. A seeded generator draws how
// much of it a call runs, and which of the streams that could go on does. Each seed favours some
// streams, so that these run far ahead of others. A program that calls in the same order sees the
// same order again. `Pace::threads`: every stream is a thread that runs its queue with seeded
// pauses, for ThreadSanitizer.
//
// The null stream is "inline": the calling thread does its work, as it does torch's operations on
// the CPU. So a wait of this stream makes the calling thread wait. An event that is recorded on it
// has happened at once, and one that it waits for soon, though `query` says so only after a drawn
// number of calls, as for a GPU that is behind. For the checker it is a stream.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "addresses.hpp"
#include "checker.hpp"
#include "opened.hpp"
#include "registered.hpp"
#include "virtual_clock.hpp"

namespace infinity::test_driver {

enum class Pace { stepped, threads };

// One recording of an event. A stream that waits for it waits for this recording alone, even if the
// event is recorded again.
struct Moment {
    bool happened = false;
    std::uint64_t shown_at = 0;  // the number of the call from which `query` says so
    Clock clock;                 // the stream's clock when the recording was queued
    std::chrono::steady_clock::time_point at;
    Time time = 0;  // on the virtual clock
};

struct Event {
    bool timing = false;
    std::shared_ptr<Moment> last = nullptr;  // null: never recorded, which counts as happened
    bool done() const { return last == nullptr || last->happened; }
};

struct Work {
    enum class Kind { run, wait, record };
    Kind kind = Kind::run;
    std::function<void()> run;
    std::shared_ptr<Moment> moment;
};

struct Stream {
    Checker::Actor actor = 0;
    bool is_inline = false;
    bool held = false;
    bool ending = false;
    bool busy = false;    // its thread is running something
    unsigned favour = 1;  // how often it is drawn
    Time time = 0;        // on the virtual clock: when all work that is queued ends
    std::deque<Work> queue;
    // The tick of the last use of bytes that each thread of the host has queued here.
    std::map<std::thread::id, std::uint64_t> last_use;
    std::thread thread;
    bool idle() const { return queue.empty() && !busy; }
};

class Machine {
  public:
    Machine();
    ~Machine();

    using Lock = std::unique_lock<std::mutex>;
    // Begins every call: counts it, and returns the result that a test asked for (0: go on).
    int begin(const char* call);
    // The result that a test asked for of a call that is neither counted nor logged (0: go on).
    int injected(const char* call);
    // Begins a call that concerns streams: like begin(), and may run some work. Other calls run
    // none. They come from garbage collection, at any time, and what a seed draws must not depend
    // on that.
    int enter(Lock& lock, const char* call);
    Lock lock() { return Lock(mutex_); }

    Stream* make_stream();
    void end_stream(Lock& lock, Stream* stream);
    Stream* find(Stream* stream);  // null: the inline one; returns nullptr for an unknown stream
    bool done(Stream& stream);

    std::shared_ptr<Event> find(Event* event);
    Event* make_event(bool timing);
    void end_event(Event* event) { events_.erase(event); }
    void record(Stream& stream, const std::shared_ptr<Event>& event);
    void wait(Lock& lock, Stream& stream, const std::shared_ptr<Event>& event);
    bool query(const std::shared_ptr<Event>& event);

    // Waits for all work, except for work that a test holds, which would never end. Afterwards all
    // work of every stream is known to the calling thread.
    void synchronize(Lock& lock);
    // Returns whether this thread knows that all work that it has queued itself is done.
    bool knows_own_work();

    // Guarded by the lock.
    Addresses& addresses() { return addresses_; }
    Registered& registered() { return registered_; }
    Opened& opened() { return opened_; }
    VirtualClock& clock() { return clock_; }
    // Counts a copy of which both ends are RAM that is not registered.
    void note_unregistered_copy() { ++unregistered_copies_; }
    // Reports that the host frees bytes, which counts as a write for the checker.
    void taken_away(std::uint64_t begin, std::uint64_t nbytes, const std::string& what);
    void report(std::string violation);

    struct Bytes {
        std::uint64_t begin;
        std::uint64_t nbytes;
        bool writes;
    };
    // Queues `work`, which uses these bytes.
    void run(Stream& stream, const std::vector<Bytes>& uses, const std::string& what,
             std::function<void()> work);
    void touched(Stream* stream, const Bytes& bytes, const std::string& what);
    // Has a stream's next work take virtual time: that of a copy of bytes, or `length` of the
    // device's. Without the clock, does nothing.
    void takes(Stream& stream, Resource resource, std::uint64_t nbytes);
    void takes(Stream& stream, Time length);

    // Controls.
    // Starts the virtual clock, which runs until the next reset. Until then work is done in the
    // call that queues it, unless it is held, and the clock says when it ends.
    void start_clock(Lock& lock, const VirtualClock::Rates& rates, bool copies);
    void reset(Lock& lock, std::uint64_t seed, Pace pace);
    void hold(Stream* stream, bool held);  // null: all
    void fail(std::string call, int nth, int code);
    void name(Stream& stream, std::string name) { checker_.rename(stream.actor, std::move(name)); }
    void separate_threads(bool separate) { separate_threads_ = separate; }
    void blind(bool blind) { blind_ = blind; }
    void release(std::uint64_t key);
    void acquire(std::uint64_t key);
    std::uint64_t count(const std::string& call) const;
    // The first calls since the last reset, at most `most_logged`, in their order.
    const std::vector<std::string>& log() const { return log_; }
    static constexpr std::size_t most_logged = 4096;
    std::uint64_t unregistered_copies() const { return unregistered_copies_; }
    std::vector<std::string> violations();
    // What was taken since the last reset and not given back, in words.
    std::vector<std::string> left() const;
    void drain(Lock& lock);

  private:
    // What a thread knows of others' work, and its time, when it hands memory over.
    struct HandOver {
        Clock clock;
        Time time = 0;
    };

    Checker::Actor host();
    // Makes known to an actor what a wait or an answer tells.
    void follow(Checker::Actor actor, const Clock& clock) {
        if (!blind_) checker_.follow(actor, clock);
    }
    // Orders the stream's next work after the host's calls so far, and begins a new use of both.
    void queued_by_host(Stream& stream);
    // Notes that an actor uses bytes now. Bytes of a stand-in are not noted.
    void use(Checker::Actor actor, const Bytes& bytes, const std::string& what);
    void queued_use(Stream& stream, const Bytes& bytes, const std::string& what);
    bool ready(const Stream& stream) const;
    bool step();  // runs one piece of work of a stepped stream; false if there is none
    void queue(Stream& stream, Work work);
    void complete(const Work& work);
    template <typename Condition>
    void until(Lock& lock, const Condition& condition);
    void dawdle(Lock& lock);
    void thread_main(Stream& stream);
    std::uint64_t draw(std::uint64_t below) { return random_() % below; }

    std::mutex mutex_;
    std::condition_variable changed_;
    std::mt19937_64 random_;
    Pace pace_ = Pace::stepped;
    unsigned eagerness_ = 2;      // how much work runs inside calls that do not wait for it
    std::uint64_t lateness_ = 8;  // the most calls after which an inline event shows
    std::uint64_t calls_ = 0;
    Checker checker_;
    Addresses addresses_;
    Registered registered_;
    Opened opened_;
    VirtualClock clock_;
    std::vector<std::string> reports_;
    std::uint64_t unregistered_copies_ = 0;
    bool separate_threads_ = false;
    bool blind_ = false;  // waits and answers make no order
    std::map<std::thread::id, Checker::Actor> hosts_;
    std::map<std::uint64_t, HandOver> handed_over_;
    std::vector<std::unique_ptr<Stream>> streams_;  // in the order in which they were made
    std::map<Event*, std::shared_ptr<Event>> events_;
    Stream inline_;
    std::map<std::string, std::uint64_t> counts_;
    std::vector<std::string> log_;
    struct Failure {
        std::string call;
        int left;
        int code;
    };
    std::vector<Failure> failures_;
};

Machine& machine();

}  // namespace infinity::test_driver
