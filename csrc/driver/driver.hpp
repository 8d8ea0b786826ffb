// A device through the table of driver calls: streams, events, copies, modules. Each handle owns
// its object of the driver and shares the Driver, so nothing outlives the context.
#pragma once

#include <cstddef>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "job_hooks.hpp"
#include "table.hpp"

namespace infinity::driver {

class Stream;

// The primary context of one device, which torch uses as well.
class Driver : public std::enable_shared_from_this<Driver> {
  public:
    // device: the device's number. Throws CallFailed if there is no such device.
    Driver(Table table, int device);
    ~Driver();
    Driver(const Driver&) = delete;
    Driver& operator=(const Driver&) = delete;

    const Table& table() const { return table_; }
    bool checked() const { return table_.touched != nullptr; }
    int number() const { return number_; }

    // Sleeps until all work that was queued on any stream is done.
    void synchronize();

    // Takes an event from those given back, or makes a new event.
    EventHandle take_event(bool timing);
    void give_back(EventHandle event, bool timing) noexcept;

    // Page-locks host memory for DMA by every context.
    void register_host(Address address, std::size_t nbytes);
    void unregister_host(Address address);

    // The allocation that has a byte of device memory, by a handle for other processes.
    struct Shared {
        SharedHandle handle;
        std::size_t offset;  // bytes from the start of the allocation to the byte
    };
    // Throws CallFailed for memory that cannot be shared, such as torch's expandable segments.
    Shared share(Address address);

    // Makes the context current on this thread while this object lives. Afterwards a thread that
    // had another context gets that context back, and a thread that had none keeps this context.
    class Current {
      public:
        explicit Current(const Driver& driver);
        ~Current();
        Current(const Current&) = delete;
        Current& operator=(const Current&) = delete;

      private:
        const Table& table_;
        ContextHandle before_ = nullptr;
    };

    void check(Result result, const char* call) const { table_.check(result, call); }
    // The answer of a query: false while the work is under way. Throws as `check` does.
    bool is_done(Result result, const char* call) const {
        if (result == not_ready) return false;
        check(result, call);
        return true;
    }

  private:
    friend class Current;
    Table table_;
    int number_;
    Device device_ = 0;
    ContextHandle context_ = nullptr;
    std::mutex mutex_;  // guards the events given back
    std::vector<EventHandle> events_;
    std::vector<EventHandle> timing_events_;
};

// Device memory of another process of this machine, until `close`.
class SharedMemory {
  public:
    // Throws CallFailed if the device cannot reach the memory, and in the process that shared it.
    SharedMemory(std::shared_ptr<Driver> driver, const SharedHandle& handle);
    ~SharedMemory();
    SharedMemory(const SharedMemory&) = delete;
    SharedMemory& operator=(const SharedMemory&) = delete;

    Address address() const { return address_; }
    // Unmaps the memory. No copy of it may be under way. A second call does nothing.
    void close();

  private:
    std::shared_ptr<Driver> driver_;
    Address address_ = 0;
};

// A moment in a stream's work. It happens once: a recorded event is never recorded again.
class Event : public std::enable_shared_from_this<Event> {
  public:
    Event(std::shared_ptr<Driver> driver, bool timing);
    ~Event();
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;

    bool done() const;
    // Milliseconds from `earlier` to this event. Both must be done and recorded with timing.
    float milliseconds_since(const Event& earlier) const;
    EventHandle handle() const { return handle_; }

  private:
    std::shared_ptr<Driver> driver_;
    bool timing_;
    EventHandle handle_;
};

// A kernel of a module, which shares the module.
class Module;
class Function {
  public:
    Function(std::shared_ptr<Module> module, FunctionHandle handle)
        : module_(std::move(module)), handle_(handle) {}
    // Queues the kernel on `grid` blocks of `block` threads. arguments: one struct that the kernel
    // declares by value, of at most `most_arguments` bytes. Throws std::invalid_argument for more.
    void launch(const Stream& stream, unsigned grid, unsigned block, const void* arguments,
                std::size_t nbytes) const;

  private:
    std::shared_ptr<Module> module_;
    FunctionHandle handle_;
};

class Module : public std::enable_shared_from_this<Module> {
  public:
    // image: a cubin, a fat binary, or PTX.
    Module(std::shared_ptr<Driver> driver, const std::string& image);
    ~Module();
    Module(const Module&) = delete;
    Module& operator=(const Module&) = delete;

    std::shared_ptr<Function> function(const std::string& name);
    const Driver& driver() const { return *driver_; }

  private:
    std::shared_ptr<Driver> driver_;
    ModuleHandle handle_ = nullptr;
};

// A queue of work on the device. The stream is its own, or somebody else's, such as torch's.
class Stream : public std::enable_shared_from_this<Stream> {
  public:
    // priority: a stream with a number above 0 goes before others. The number is clamped to the
    // device's range.
    Stream(std::shared_ptr<Driver> driver, int priority);
    Stream(std::shared_ptr<Driver> driver, StreamHandle foreign);
    ~Stream();
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;

    // Work that is queued from now on comes after the event.
    void wait(const Event& event) const;
    std::shared_ptr<Event> record(bool timing) const;
    bool done() const;
    // Queues a copy in either direction, in pieces of `piece` bytes. With a `piece` of 0 it is one
    // copy.
    void copy(Address into, Address source, std::size_t nbytes, std::size_t piece) const;
    // Tells the checker that work queued here, of which the driver knows nothing, uses these bytes.
    void touched(Address address, std::size_t nbytes, bool writes, const char* label) const;

    StreamHandle handle() const { return handle_; }
    const std::shared_ptr<Driver>& driver() const { return driver_; }

  private:
    std::shared_ptr<Driver> driver_;
    StreamHandle handle_ = nullptr;
    bool owned_;
};

// The copies around jobs of the CPU that are submitted together: those to the host that bring what
// the jobs read, and those to the device, of what they have written. No thread of Python takes
// part.
class CopiesAround : public std::enable_shared_from_this<CopiesAround> {
  public:
    struct Copy {
        Address into;
        Address source;
        std::size_t nbytes;
    };
    // The copy to the device of each job, in pieces as by Stream::copy, after an event (null: after
    // none).
    struct Up {
        std::shared_ptr<Stream> stream;
        std::shared_ptr<Event> after;
        std::vector<Copy> copies;
        std::size_t piece;
        bool timing;
    };
    // Bytes that a job uses, for the checker.
    struct Use {
        Address address;
        std::size_t nbytes;
        bool writes;
    };

    // downs: for each job, an event that happens when its inputs have come; null: they are there.
    // Without an `up` nothing is copied to the device. uses: for each job; empty: nothing is told.
    CopiesAround(std::shared_ptr<Driver> driver, std::vector<std::shared_ptr<Event>> downs,
                 std::optional<Up> up, std::vector<std::vector<Use>> uses, std::string label);

    // What one job waits for and starts, as by JobHooks. Any thread may call these.
    JobHooks::State before(std::size_t job) noexcept;
    void after(std::size_t job) noexcept;

    // The hooks of all jobs, which share this object.
    std::vector<std::shared_ptr<JobHooks>> hooks();

    // Once all jobs are done: the events before the first copy up and after the last one. The first
    // is null without timing, and both are null if no copy was queued.
    const std::pair<std::shared_ptr<Event>, std::shared_ptr<Event>>& events() const {
        return events_;
    }
    // Once all jobs are done: throws the first error of a call, which has kept a job from beginning
    // or a copy from being queued.
    void check() const;

  private:
    void begin_up();
    void end_job();
    void fail() noexcept;

    const std::shared_ptr<Driver> driver_;
    const std::vector<std::shared_ptr<Event>> downs_;
    const std::optional<Up> up_;
    const std::vector<std::vector<Use>> uses_;
    const std::string label_;
    std::mutex mutex_;  // guards all below until all jobs are done
    std::size_t left_;  // jobs that have neither ended nor failed to begin
    bool begun_ = false;
    std::pair<std::shared_ptr<Event>, std::shared_ptr<Event>> events_;
    std::exception_ptr failure_;
};

}  // namespace infinity::driver
