// Runs two kernel tables over the same adversarial inputs and demands the same bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "check.hpp"
#include "hyper.hpp"
#include "isa.hpp"

namespace infinity::cpu_adam {

// Every kind of fp32: ordinary, denormal, huge, zeros of both signs, infinities, NaNs with payload.
inline float adversarial(std::mt19937& random) {
    static const uint32_t special[] = {0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00800000,
                                       0x7F7FFFFF, 0xFF7FFFFF, 0x3F800000, 0x3F808000, 0x3F807FFF,
                                       0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF, 0x7FC12345};
    uint32_t bits = random();
    if (bits % 8 == 0) {
        bits = special[random() % 15];
    } else if (bits % 2 == 0) {  // ordinary magnitudes
        bits = (bits & 0x807FFFFFU) | ((0x70U + random() % 16) << 23);
    }
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

// The arrays of one update, as plain memory that can be compared.
struct Page {
    Page(size_t elements, uint32_t seed) : grad(elements * 4) {
        std::mt19937 random(seed);
        for (size_t i = 0; i < elements; ++i) {
            param.push_back(adversarial(random));
            acc.push_back(adversarial(random));
            first.push_back(adversarial(random));
            const float v = adversarial(random);
            second.push_back(v < 0 ? -v : v);
            high.push_back(static_cast<uint16_t>(random()));
            low.push_back(static_cast<int16_t>(random()));
            copy.push_back(0.0F);
            first_half.push_back(static_cast<uint16_t>(random()));
            second_half.push_back(static_cast<uint16_t>(random() & 0x7FFFU));
            first_code.push_back(static_cast<uint8_t>(random()));
            second_code.push_back(static_cast<uint8_t>(random()));
        }
        // Scales of every exponent, including those for NaN and those below the lowest.
        for (size_t i = 0; i < elements / kCodeBlock + 1; ++i) {
            const bool any = random() % 4 == 0;
            first_scale.push_back(static_cast<uint8_t>(any ? random() : 100 + random() % 40));
            second_scale.push_back(static_cast<uint8_t>(any ? random() : 100 + random() % 40));
        }
        for (uint8_t& byte : grad) byte = static_cast<uint8_t>(random());
        for (size_t i = 0; i < elements; ++i) {
            const float g = adversarial(random);
            if (random() % 2 == 0) std::memcpy(grad.data() + 4 * i, &g, 4);
        }
    }
    // Removes infinities and NaNs from half of the blocks, so that these have codes to compare.
    void calm() {
        std::mt19937 random(7);
        for (size_t i = 0; i < acc.size(); ++i) {
            if (i / kCodeBlock % 2 != 0) continue;
            const float g = std::ldexp(static_cast<float>(random() % 1000) - 500.0F,
                                       -static_cast<int>(random() % 40));
            acc[i] = param[i] = g;
            std::memset(grad.data() + 4 * i, 0, 4);
            first_scale[i / kCodeBlock] = second_scale[i / kCodeBlock] = 110;
        }
    }
    UpdateArrays arrays(ParameterFormat format, MomentFormat moments, bool accumulated) {
        UpdateArrays a;
        a.grad = grad.data();
        if (accumulated) a.acc = acc.data();
        if (format == ParameterFormat::kSplit) {
            a.param = high.data();
            a.remainder = low.data();
        } else {
            a.param = param.data();
            a.copy = copy.data();
        }
        a.first_moment = first.data();
        a.second_moment = second.data();
        if (moments == MomentFormat::kBf16) {
            a.first_moment = first_half.data();
            a.second_moment = second_half.data();
        } else if (moments == MomentFormat::kInt8) {
            a.first_moment = first_code.data();
            a.second_moment = second_code.data();
            a.first_scale = first_scale.data();
            a.second_scale = second_scale.data();
        }
        return a;
    }
    std::vector<uint8_t> grad;
    std::vector<float> param, acc, first, second, copy;
    std::vector<uint16_t> high, first_half, second_half;
    std::vector<int16_t> low;
    std::vector<uint8_t> first_code, second_code, first_scale, second_scale;
};

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
    return std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

inline bool same_bits(const Page& a, const Page& b) {
    return same_bits(a.param, b.param) && same_bits(a.first, b.first) &&
           same_bits(a.second, b.second) && same_bits(a.copy, b.copy) &&
           same_bits(a.high, b.high) && same_bits(a.low, b.low) && same_bits(a.acc, b.acc) &&
           same_bits(a.first_half, b.first_half) && same_bits(a.second_half, b.second_half) &&
           same_bits(a.first_code, b.first_code) && same_bits(a.second_code, b.second_code) &&
           same_bits(a.first_scale, b.first_scale) && same_bits(a.second_scale, b.second_scale);
}

inline std::vector<Hyper> every_rule() {
    return {AdamHyper{true, 1e-2, 0.9, 0.999, 1e-8, 0.1, 3, false},
            AdamHyper{true, 1e-2, 0.25, 0.4, 1e-8, 0.1, 3, false},
            AdamHyper{true, 1e-2, 0.0, 0.999, 0.0, 0.0, 1, true},
            AdamHyper{false, 1e-2, 0.9, 0.999, 1e-8, 0.1, 1000000, false},
            AdamHyper{false, 1e-2, 0.5, 0.0, 1e-8, 0.1, 3, false},
            SgdHyper{0.1, 0.0, 0.0, 1e-4, false, false, false},
            SgdHyper{0.1, 0.9, 0.5, 1e-4, false, false, true},
            SgdHyper{0.1, 0.9, 0.0, 1e-4, true, false, false},
            SgdHyper{0.1, 0.9, 0.5, 0.0, false, true, false},
            AdagradHyper{0.1, 0.01, 1e-10, 1e-4, 7, false},
            LionHyper{1e-2, 0.9, 0.99, 0.1, false}};
}

inline void compare_formats(const KernelTable& a, const KernelTable& b, const Folded& folded,
                            size_t elements, const Range& range, MomentFormat moments,
                            uint32_t seed) {
    const int rule = static_cast<int>(folded.rule);
    const int kept = static_cast<int>(moments);
    for (int dtype = 0; dtype < kDtypes; ++dtype) {
        for (int format = 0; format < kParameterFormats; ++format) {
            for (const bool accumulated : {false, true}) {
                Page one(elements, ++seed);
                if (accumulated) one.calm();
                Page two = one;
                const ParameterFormat f = static_cast<ParameterFormat>(format);
                Page beside = one;
                const Page before = one;
                const UpdateArrays in_place = one.arrays(f, moments, accumulated);
                const bool bad_one =
                    a.update[rule][dtype][format][kept](in_place, in_place, folded, range);
                const bool bad_two = b.update[rule][dtype][format][kept](
                    two.arrays(f, moments, accumulated), beside.arrays(f, moments, accumulated),
                    folded, range);
                CHECK(bad_one == bad_two);
                CHECK(same_bits(one, beside));
                CHECK(same_bits(two, before));
            }
        }
    }
}

// Formats without blocks start at `begin`; formats with blocks start at the next block's border.
inline void compare_updates(const KernelTable& a, const KernelTable& b, size_t elements,
                            size_t begin, size_t count) {
    uint32_t seed = 1;
    const size_t on_block = (begin + kCodeBlock - 1) / kCodeBlock * kCodeBlock;
    for (const Hyper& hyper : every_rule()) {
        const Folded folded = fold(hyper, 0.75);
        const uint32_t index = 0xFFFFFFC0U;  // wraps within the range
        compare_formats(a, b, folded, elements, {begin, count, index, seed}, MomentFormat::kF32,
                        seed);
        compare_formats(a, b, folded, elements, {begin, count, index, seed}, MomentFormat::kBf16,
                        seed);
        compare_formats(a, b, folded, elements, {on_block, count, index, seed}, MomentFormat::kInt8,
                        seed);
        seed += 30;
    }
}

inline void compare_gradients(const KernelTable& a, const KernelTable& b, size_t elements,
                              size_t begin, size_t count) {
    for (int dtype = 0; dtype < kDtypes; ++dtype) {
        for (int mode = 0; mode < 16; ++mode) {
            Page one(elements, static_cast<uint32_t>(dtype * 16 + mode));
            Page two = one;
            std::vector<double> sums_one(elements / kBlock + 1);
            std::vector<double> sums_two = sums_one;
            const auto run = [&](const KernelTable& table, Page& page, std::vector<double>& sums) {
                void* const copy = (mode & 8) != 0 ? page.copy.data() : nullptr;
                GradientArrays arrays{page.grad.data(), page.acc.data(), copy, (mode & 1) != 0,
                                      (mode & 2) != 0,  (mode & 4) != 0, 0.3F};
                table.gradient[dtype](arrays, begin, count, sums.data());
            };
            run(a, one, sums_one);
            run(b, two, sums_two);
            CHECK(same_bits(one, two));
            for (size_t i = 0; i < sums_one.size(); ++i) {
                const bool both_nan = sums_one[i] != sums_one[i] && sums_two[i] != sums_two[i];
                CHECK(both_nan || sums_one[i] == sums_two[i]);
            }
        }
    }
}

inline void compare_streams(const KernelTable& a, const KernelTable& b) {
    Page one(1000, 5);
    Page two = one;
    const auto run = [](const KernelTable& table, Page& page) {
        const StreamArray arrays[] = {
            {page.grad.data(), 4, Access::kRead},
            {reinterpret_cast<unsigned char*>(page.param.data()), 4, Access::kReadWrite},
            {reinterpret_cast<unsigned char*>(page.high.data()), 2, Access::kWrite}};
        table.stream(arrays, 3, 64, 3, 900);
    };
    run(a, one);
    run(b, two);
    CHECK(same_bits(one, two));
}

// Counts and offsets around every register width, head alignment and block size.
inline void compare_tables(const KernelTable& a, const KernelTable& b) {
    for (const size_t count : {0U, 1U, 2U, 3U, 7U, 15U, 16U, 17U, 31U, 63U, 97U}) {
        for (const size_t begin : {0U, 1U, 5U}) compare_updates(a, b, 192, begin, count);
    }
    for (const size_t count : {1U, 33U, 4095U, 4096U, 4097U, 8200U}) {
        compare_gradients(a, b, 9000, 0, count);
        compare_gradients(a, b, 9000, 7, count);
    }
    compare_updates(a, b, 6100, 3, 5990);
    compare_streams(a, b);
}

}  // namespace infinity::cpu_adam
