#include "engine.hpp"

#include <pthread.h>

#include <cerrno>
#include <future>

#include "loop.hpp"
#include "quiet_thread.hpp"

namespace infinity::aio {
namespace {

constexpr unsigned deepest = 4096;
constexpr uint32_t smallest_block = 4096;
constexpr uint32_t largest_block = 1u << 30;

Options validated(Options options) {
    if (options.depth < 1 || options.depth > deepest)
        throw BadRequest("depth is " + std::to_string(options.depth) + ".",
                         "Give between 1 and 4096 transfers in flight.");
    if (options.block_bytes < smallest_block || options.block_bytes > largest_block ||
        options.block_bytes % smallest_block != 0)
        throw BadRequest("block_bytes is " + std::to_string(options.block_bytes) + ".",
                         "Give a multiple of 4096 up to 1 GiB.");
    if (options.write_slack.count() < 0)
        throw BadRequest("write_slack is negative.", "Give seconds, 0 or more.");
    return options;
}

}  // namespace

Engine::Engine(Options options) : options_(validated(std::move(options))) {
    facts_.chosen = choose(options_.directory, options_.backend, facts_.rejected);
    backend_ = make_backend(facts_.chosen.name, options_.depth);
    facts_.chosen.features = backend_->features();
    if (options_.faults) backend_ = make_faulty(std::move(backend_), options_.faults);
    thread_ = quiet_thread([this] { run(); });
}

std::shared_ptr<Engine> Engine::create(Options options) {
    // In a forked child an engine is left as it is. Its thread does not exist there, its ring
    // belongs to the parent, and destroying a condition variable that had waiters may never return.
    return {new Engine(std::move(options)), [](Engine* engine) {
                if (!engine->forked()) delete engine;
            }};
}

Engine::~Engine() { close(); }

std::shared_ptr<File> Engine::open(const std::string& path, bool writable, bool verify) {
    const bool direct = facts_.chosen.direct || !options_.directory;
    std::shared_ptr<File> file = File::open(path, writable, direct);
    if (verify) file->verify();
    if (!call([&] { backend_->attach(*file); }))
        throw BadRequest("The I/O engine is closed.", "Open files before closing it.");
    return file;
}

void Engine::close_file(const std::shared_ptr<File>& file) {
    {
        std::unique_lock lock(mutex_);
        file->closed = true;
        landed_.wait(lock, [&] { return file->pending == 0; });
    }
    call([&] { backend_->detach(*file); });
}

void Engine::submit(std::vector<std::unique_ptr<Request>> requests) {
    {
        const std::lock_guard lock(mutex_);
        if (!closing_) {
            for (auto& request : requests) {
                ++request->file->pending;
                inbox_.requests.push_back(std::move(request));
            }
            wake_if_asleep();
            return;
        }
    }
    for (const auto& request : requests)
        request->future->land({verb(request->kind), request->file->path(), {}, ECANCELED});
}

// Called with the mutex held, so that the backend cannot be destroyed meanwhile.
void Engine::wake_if_asleep() {
    if (!wake_me_) return;
    wake_me_ = false;
    aside_.keep(thread_.native_handle());
    backend_->wake();
}

// Runs a command on the submission thread and waits for it. Returns false if the engine is closed.
bool Engine::call(const std::function<void()>& command) {
    std::promise<void> ran;
    {
        const std::lock_guard lock(mutex_);
        if (closing_) return false;
        inbox_.commands.push_back([&] {
            command();
            ran.set_value();
        });
        wake_if_asleep();
    }
    ran.get_future().wait();
    return true;
}

bool Engine::register_buffer(std::byte* address, size_t bytes) {
    std::string failure = "the engine is closed";
    call([&] { failure = backend_->register_buffer(address, bytes); });
    const std::lock_guard lock(mutex_);
    facts_.registration_failure = failure;
    if (failure.empty()) registered_[address] = bytes;
    return failure.empty();
}

void Engine::close() {
    if (forked()) return;
    const std::lock_guard joining(joining_);
    if (!thread_.joinable()) return;
    {
        const std::lock_guard lock(mutex_);
        closing_ = true;
        backend_->wake();
    }
    thread_.join();
    backend_.reset();
}

bool Engine::closed() const {
    const std::lock_guard lock(mutex_);
    return closing_;
}

Stats Engine::stats() const {
    const std::lock_guard lock(mutex_);
    return stats_;
}

Facts Engine::facts() const {
    const std::lock_guard lock(mutex_);
    Facts facts = facts_;
    for (const auto& [address, bytes] : registered_) facts.registered_bytes += bytes;
    return facts;
}

void Engine::run() {
    pthread_setname_np(pthread_self(), "infinity-aio");
    backend_->start();
    Loop loop(*backend_, options_.depth, options_.block_bytes);
    while (true) {
        loop.issue();
        switch (exchange(loop)) {
            case Next::issue:
                break;
            case Next::sleep:
                loop.wait(true);
                break;
            case Next::sleep_unwakeable:
                loop.wait(false);
                break;
            case Next::close:
                return shut_down(loop);
        }
    }
}

// Exchanges with the other threads: hands over what has landed, and takes new requests.
Engine::Next Engine::exchange(Loop& loop) {
    std::vector<Landed> landed = loop.take_landed();
    if (!landed.empty()) {
        {
            const std::lock_guard lock(mutex_);
            stats_ = loop.stats();
        }
        for (Landed& request : landed) request.tell();
    }
    Inbox inbox;
    bool closing;
    {
        const std::lock_guard lock(mutex_);
        for (const Landed& request : landed) --request.file->pending;
        if (!landed.empty()) {
            landed.clear();  // before anyone is told that nothing refers to the file any more
            landed_.notify_all();
        }
        stats_ = loop.stats();
        closing = closing_;
        const bool news = !inbox_.requests.empty() || !inbox_.commands.empty();
        wake_me_ = !news && !closing && !loop.full();
        if (wake_me_) return Next::sleep;
        if (!news && !closing) return Next::sleep_unwakeable;
        std::swap(inbox, inbox_);
    }
    for (const auto& command : inbox.commands) command();
    for (auto& request : inbox.requests) loop.add(std::move(request));
    return closing ? Next::close : Next::issue;
}

void Engine::shut_down(Loop& loop) {
    while (true) {
        loop.cancel();
        exchange(loop);
        if (loop.idle()) return;
        loop.wait(false);
    }
}

}  // namespace infinity::aio
