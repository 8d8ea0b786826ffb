// A device whose memory is RAM and whose streams dawdle.
//
// [Note: how streams run]
// `Pace::stepped`: work runs only inside calls, on the thread that calls. A seeded generator draws
// how much of it a call runs and which of the streams that could go on does, and each seed has
// streams that it favours, so that some run far ahead of others. A program that calls in the same
// order sees the same order again. `Pace::threads`: every stream is a thread that runs its queue
// with seeded pauses, for ThreadSanitizer.
//
// The null stream is "inline": its work is done by the thread that calls, as torch's operations on
// the CPU are. To wait there is to wait; an event that is recorded there has happened, though
// `query` does not say so before a drawn number of calls, as a GPU that is behind would not. For
// the checker it is a stream.
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
#include "registered.hpp"

namespace infinity::test_driver {

enum class Pace { stepped, threads };

// One recording of an event. Who waits for it waits for it alone, though the event be recorded
// again.
struct Moment {
    bool happened = false;
    std::uint64_t shown_at = 0;  // inline: the call from which on `query` says so
    Clock clock;                 // of the stream when it was queued
    std::chrono::steady_clock::time_point at;
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
    std::deque<Work> queue;
    // The tick of the last use of bytes that a thread of the host has queued.
    std::map<std::thread::id, std::uint64_t> last_use;
    std::thread thread;
    bool idle() const { return queue.empty() && !busy; }
};

class Machine {
  public:
    Machine();
    ~Machine();

    using Lock = std::unique_lock<std::mutex>;
    // Every call begins so: counts it, and says what to return instead of doing it (0: go on).
    int begin(const char* call);
    // And a call that has to do with streams may run some work then. Others do not: garbage makes
    // them, whenever it is collected, and what a seed draws shall not depend on that.
    int enter(Lock& lock, const char* call);
    Lock lock() { return Lock(mutex_); }

    Stream* make_stream();
    void end_stream(Lock& lock, Stream* stream);
    Stream* find(Stream* stream);  // null: the inline one; nullptr for what is none
    bool done(Stream& stream);

    std::shared_ptr<Event> find(Event* event);
    Event* make_event(bool timing);
    void end_event(Event* event) { events_.erase(event); }
    void record(Stream& stream, const std::shared_ptr<Event>& event);
    void wait(Lock& lock, Stream& stream, const std::shared_ptr<Event>& event);
    bool query(const std::shared_ptr<Event>& event);

    // Waits for all work, but for what a test holds: that it would wait for in vain. What is known
    // afterwards is all work of every stream.
    void synchronize(Lock& lock);
    // Whether this thread knows to be done all the work that it has queued itself.
    bool knows_own_work();

    // Guarded by the lock.
    Addresses& addresses() { return addresses_; }
    Registered& registered() { return registered_; }
    // A copy whose ends are both RAM that is not registered.
    void note_unregistered_copy() { ++unregistered_copies_; }
    // The host takes bytes away from under whoever uses them.
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

    // Controls.
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
    Checker::Actor host();
    // What a wait or an answer makes known.
    void follow(Checker::Actor actor, const Clock& clock) {
        if (!blind_) checker_.follow(actor, clock);
    }
    // The host's order, then one thing more of both.
    void queued_by_host(Stream& stream);
    // An actor uses bytes now, which are not a stand-in's.
    void use(Checker::Actor actor, const Bytes& bytes, const std::string& what);
    void queued_use(Stream& stream, const Bytes& bytes, const std::string& what);
    bool ready(const Stream& stream) const;
    bool step();  // runs one piece of work of a stepped stream; false where none can
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
    unsigned eagerness_ = 2;      // how much of the work runs inside calls that do not wait for it
    std::uint64_t lateness_ = 8;  // calls after which an inline event shows, at the most
    std::uint64_t calls_ = 0;
    Checker checker_;
    Addresses addresses_;
    Registered registered_;
    std::vector<std::string> reports_;
    std::uint64_t unregistered_copies_ = 0;
    bool separate_threads_ = false;
    bool blind_ = false;  // waits and answers make no order
    std::map<std::thread::id, Checker::Actor> hosts_;
    std::map<std::uint64_t, Clock> handed_over_;
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
