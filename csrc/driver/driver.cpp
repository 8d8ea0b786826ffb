#include "driver.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace infinity::driver {

Driver::Driver(Table table, int device) : table_(table), number_(device) {
    check(table_.init(0), "cuInit");
    check(table_.device_get(&device_, device), "cuDeviceGet");
    check(table_.context_retain(&context_, device_), "cuDevicePrimaryCtxRetain");
}

Driver::~Driver() {
    // At the end of the process the driver may be gone already, so the results are ignored.
    for (auto* events : {&events_, &timing_events_}) {
        for (EventHandle event : *events) table_.event_destroy(event);
    }
    table_.context_release(device_);
}

Driver::Current::Current(const Driver& driver) : table_(driver.table_) {
    driver.check(table_.context_get(&before_), "cuCtxGetCurrent");
    if (before_ == driver.context_) {
        before_ = nullptr;
        return;
    }
    driver.check(table_.context_set(driver.context_), "cuCtxSetCurrent");
}

Driver::Current::~Current() {
    if (before_ != nullptr) table_.context_set(before_);
}

EventHandle Driver::take_event(bool timing) {
    {
        const std::lock_guard lock(mutex_);
        auto& rest = timing ? timing_events_ : events_;
        if (!rest.empty()) {
            EventHandle found = rest.back();
            rest.pop_back();
            return found;
        }
    }
    EventHandle made = nullptr;
    check(table_.event_create(&made, timing ? 0 : without_timing), "cuEventCreate");
    return made;
}

void Driver::give_back(EventHandle event, bool timing) noexcept {
    try {
        const std::lock_guard lock(mutex_);
        (timing ? timing_events_ : events_).push_back(event);
    } catch (const std::bad_alloc&) {
        table_.event_destroy(event);
    }
}

void Driver::synchronize() {
    const Current current(*this);
    check(table_.synchronize(), "cuCtxSynchronize");
}

void Driver::register_host(Address address, std::size_t nbytes) {
    const Current current(*this);
    check(table_.host_register(reinterpret_cast<void*>(address), nbytes, portable),
          "cuMemHostRegister");
}

void Driver::unregister_host(Address address) {
    const Current current(*this);
    check(table_.host_unregister(reinterpret_cast<void*>(address)), "cuMemHostUnregister");
}

Driver::Shared Driver::share(Address address) {
    const Current current(*this);
    Address start = 0;
    std::size_t nbytes = 0;
    Shared found{};
    check(table_.address_range(&start, &nbytes, address), "cuMemGetAddressRange");
    check(table_.share(&found.handle, start), "cuIpcGetMemHandle");
    found.offset = address - start;
    return found;
}

SharedMemory::SharedMemory(std::shared_ptr<Driver> driver, const SharedHandle& handle)
    : driver_(std::move(driver)) {
    const Driver::Current current(*driver_);
    driver_->check(driver_->table().open_shared(&address_, handle, with_peer_access),
                   "cuIpcOpenMemHandle");
}

SharedMemory::~SharedMemory() {
    try {
        close();
    } catch (const CallFailed&) {  // the context is gone, and with it the mapping
    }
}

void SharedMemory::close() {
    if (address_ == 0) return;
    const Driver::Current current(*driver_);
    driver_->check(driver_->table().close_shared(std::exchange(address_, 0)),
                   "cuIpcCloseMemHandle");
}

Event::Event(std::shared_ptr<Driver> driver, bool timing)
    : driver_(std::move(driver)), timing_(timing), handle_(driver_->take_event(timing)) {}

Event::~Event() { driver_->give_back(handle_, timing_); }

bool Event::done() const {
    const Driver::Current current(*driver_);
    return driver_->is_done(driver_->table().event_query(handle_), "cuEventQuery");
}

float Event::milliseconds_since(const Event& earlier) const {
    const Driver::Current current(*driver_);
    float milliseconds = 0;
    driver_->check(driver_->table().event_elapsed(&milliseconds, earlier.handle_, handle_),
                   "cuEventElapsedTime");
    return milliseconds;
}

void Function::launch(const Stream& stream, unsigned grid, unsigned block, const void* arguments,
                      std::size_t nbytes) const {
    if (nbytes > most_arguments)
        throw std::invalid_argument("a kernel takes at most 4096 bytes of arguments");
    void* extra[] = {reinterpret_cast<void*>(launch_buffer), const_cast<void*>(arguments),
                     reinterpret_cast<void*>(launch_buffer_size), &nbytes,
                     reinterpret_cast<void*>(launch_end)};
    const Driver& driver = module_->driver();
    const Driver::Current current(driver);
    driver.check(
        driver.table().launch(handle_, grid, 1, 1, block, 1, 1, 0, stream.handle(), nullptr, extra),
        "cuLaunchKernel");
}

Module::Module(std::shared_ptr<Driver> driver, const std::string& image)
    : driver_(std::move(driver)) {
    const Driver::Current current(*driver_);
    // PTX is text that ends with a zero byte, which std::string stores after its own bytes.
    driver_->check(driver_->table().module_load(&handle_, image.c_str()), "cuModuleLoadData");
}

Module::~Module() {
    try {
        const Driver::Current current(*driver_);
        driver_->table().module_unload(handle_);
    } catch (const CallFailed&) {  // the context is gone, and with it the module
    }
}

std::shared_ptr<Function> Module::function(const std::string& name) {
    const Driver::Current current(*driver_);
    FunctionHandle found = nullptr;
    driver_->check(driver_->table().module_function(&found, handle_, name.c_str()),
                   "cuModuleGetFunction");
    return std::make_shared<Function>(shared_from_this(), found);
}

Stream::Stream(std::shared_ptr<Driver> driver, int priority)
    : driver_(std::move(driver)), owned_(true) {
    const Driver::Current current(*driver_);
    int least = 0;
    int greatest = 0;     // the greatest priority is the smallest number
    if (priority != 0) {  // a driver that refuses this may still make ordinary streams
        driver_->check(driver_->table().priority_range(&least, &greatest),
                       "cuCtxGetStreamPriorityRange");
    }
    driver_->check(driver_->table().stream_create(&handle_, non_blocking,
                                                  std::clamp(-priority, greatest, least)),
                   "cuStreamCreateWithPriority");
}

Stream::Stream(std::shared_ptr<Driver> driver, StreamHandle foreign)
    : driver_(std::move(driver)), handle_(foreign), owned_(false) {}

Stream::~Stream() {
    if (owned_) driver_->table().stream_destroy(handle_);
}

void Stream::wait(const Event& event) const {
    const Driver::Current current(*driver_);
    driver_->check(driver_->table().stream_wait(handle_, event.handle(), 0), "cuStreamWaitEvent");
}

std::shared_ptr<Event> Stream::record(bool timing) const {
    const Driver::Current current(*driver_);
    auto event = std::make_shared<Event>(driver_, timing);
    driver_->check(driver_->table().event_record(event->handle(), handle_), "cuEventRecord");
    return event;
}

bool Stream::done() const {
    const Driver::Current current(*driver_);
    return driver_->is_done(driver_->table().stream_query(handle_), "cuStreamQuery");
}

void Stream::copy(Address into, Address source, std::size_t nbytes, std::size_t piece) const {
    const Driver::Current current(*driver_);
    if (piece == 0) piece = nbytes;
    for (std::size_t start = 0; start < nbytes; start += piece) {
        const std::size_t count = std::min(piece, nbytes - start);
        driver_->check(driver_->table().copy(into + start, source + start, count, handle_),
                       "cuMemcpyAsync");
    }
}

void Stream::touched(Address address, std::size_t nbytes, bool writes, const char* label) const {
    if (driver_->checked()) {
        driver_->table().touched(handle_, 0, address, nbytes, writes ? 1 : 0, label);
    }
}

namespace {

class HooksOfJob : public JobHooks {
  public:
    HooksOfJob(std::shared_ptr<CopiesAround> all, std::size_t job)
        : all_(std::move(all)), job_(job) {}
    State before() noexcept override { return all_->before(job_); }
    void after() noexcept override { all_->after(job_); }

  private:
    const std::shared_ptr<CopiesAround> all_;
    const std::size_t job_;
};

}  // namespace

CopiesAround::CopiesAround(std::shared_ptr<Driver> driver,
                           std::vector<std::shared_ptr<Event>> downs, std::optional<Up> up,
                           std::vector<std::vector<Use>> uses, std::string label)
    : driver_(std::move(driver)),
      downs_(std::move(downs)),
      up_(std::move(up)),
      uses_(std::move(uses)),
      label_(std::move(label)),
      left_(downs_.size()) {}

JobHooks::State CopiesAround::before(std::size_t job) noexcept {
    try {
        if (downs_[job] != nullptr && !downs_[job]->done()) return JobHooks::State::pending;
    } catch (...) {
        fail();
        end_job();
        return JobHooks::State::failed;
    }
    if (driver_->checked() && !uses_.empty()) {
        for (const Use& each : uses_[job]) {
            driver_->table().touched(nullptr, 1, each.address, each.nbytes, each.writes ? 1 : 0,
                                     label_.c_str());
        }
    }
    return JobHooks::State::happened;
}

void CopiesAround::after(std::size_t job) noexcept {
    if (up_) {
        try {
            begin_up();
            const Copy& copy = up_->copies[job];
            up_->stream->copy(copy.into, copy.source, copy.nbytes, up_->piece);
        } catch (...) {
            fail();
        }
    }
    end_job();
}

std::vector<std::shared_ptr<JobHooks>> CopiesAround::hooks() {
    std::vector<std::shared_ptr<JobHooks>> found;
    for (std::size_t job = 0; job < downs_.size(); ++job) {
        found.push_back(std::make_shared<HooksOfJob>(shared_from_this(), job));
    }
    return found;
}

void CopiesAround::check() const {
    if (failure_ != nullptr) std::rethrow_exception(failure_);
}

// Before the first copy up: has the stream wait. Other jobs' copies are queued after this.
void CopiesAround::begin_up() {
    const std::lock_guard lock(mutex_);
    if (begun_) return;
    if (up_->after != nullptr) up_->stream->wait(*up_->after);
    if (up_->timing) events_.first = up_->stream->record(true);
    begun_ = true;
}

// After the last job: records the event after all copies up, which have been queued by then.
void CopiesAround::end_job() {
    const std::lock_guard lock(mutex_);
    if (--left_ > 0 || !begun_) return;
    try {
        events_.second = up_->stream->record(up_->timing);
    } catch (...) {
        if (failure_ == nullptr) failure_ = std::current_exception();
    }
}

void CopiesAround::fail() noexcept {
    const std::lock_guard lock(mutex_);
    if (failure_ == nullptr) failure_ = std::current_exception();
}

}  // namespace infinity::driver
