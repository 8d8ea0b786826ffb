#include "repeated.hpp"

#include <exception>
#include <stdexcept>
#include <utility>

namespace infinity::driver {

namespace {

AllocationProperties properties_of(const Driver& driver) {
    AllocationProperties properties{};
    properties.type = pinned;
    properties.location = {on_device, driver.number()};
    return properties;
}

}  // namespace

std::size_t granularity(const Driver& driver) {
    const Driver::Current current(driver);
    const AllocationProperties properties = properties_of(driver);
    std::size_t nbytes = 0;
    driver.check(driver.table().granularity(&nbytes, &properties, minimum),
                 "cuMemGetAllocationGranularity");
    return nbytes;
}

RepeatedMemory::RepeatedMemory(std::shared_ptr<Driver> driver, std::size_t chunk, std::size_t count,
                               unsigned char value)
    : driver_(std::move(driver)), chunk_(chunk) {
    if (chunk == 0 || count == 0) throw std::invalid_argument("a chunk, at least once");
    try {
        make(count, value);
    } catch (...) {
        const auto failure = std::current_exception();
        try {
            release();
        } catch (const CallFailed&) {  // the first error says more
        }
        std::rethrow_exception(failure);
    }
}

void RepeatedMemory::make(std::size_t count, unsigned char value) {
    const Driver::Current current(*driver_);
    const Table& table = driver_->table();
    const AllocationProperties properties = properties_of(*driver_);
    const std::size_t nbytes = count * chunk_;
    driver_->check(table.address_reserve(&address_, nbytes, 0, 0, 0), "cuMemAddressReserve");
    reserved_ = nbytes;
    driver_->check(table.memory_create(&memory_, chunk_, &properties, 0), "cuMemCreate");
    created_ = true;
    for (; mapped_ < count; ++mapped_) {
        driver_->check(table.memory_map(address_ + mapped_ * chunk_, chunk_, 0, memory_, 0),
                       "cuMemMap");
    }
    const Access access = {properties.location, read_write};
    driver_->check(table.memory_access(address_, nbytes, &access, 1), "cuMemSetAccess");
    driver_->check(table.memory_fill(address_, value, chunk_), "cuMemsetD8");
}

void RepeatedMemory::release() {
    const Driver::Current current(*driver_);
    const Table& table = driver_->table();
    std::exception_ptr first;
    const auto called = [&](Result result, const char* call) {
        try {
            driver_->check(result, call);
        } catch (const CallFailed&) {
            if (!first) first = std::current_exception();
        }
    };
    while (mapped_ > 0) {
        --mapped_;
        called(table.memory_unmap(address_ + mapped_ * chunk_, chunk_), "cuMemUnmap");
    }
    if (std::exchange(created_, false)) called(table.memory_release(memory_), "cuMemRelease");
    const std::size_t nbytes = std::exchange(reserved_, 0);
    if (nbytes != 0) called(table.address_free(address_, nbytes), "cuMemAddressFree");
    if (first) std::rethrow_exception(first);
}

}  // namespace infinity::driver
