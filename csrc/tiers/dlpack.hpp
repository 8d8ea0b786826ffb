// DLPack 0.x, the layout that every torch reads: https://dmlc.github.io/dlpack/latest/c_api.html
#pragma once

#include <cstdint>

namespace infinity::tiers {

struct DLDevice {
    std::int32_t device_type;
    std::int32_t device_id;
};

struct DLDataType {
    std::uint8_t code;  // 1: unsigned integer
    std::uint8_t bits;
    std::uint16_t lanes;
};

struct DLTensor {
    void* data;
    DLDevice device;
    std::int32_t ndim;
    DLDataType dtype;
    std::int64_t* shape;
    std::int64_t* strides;
    std::uint64_t byte_offset;
};

struct DLManagedTensor {
    DLTensor dl_tensor;
    void* manager_ctx;
    void (*deleter)(DLManagedTensor* self);
};

}  // namespace infinity::tiers
