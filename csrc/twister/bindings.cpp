// The Python face of the twister; infinity/model/draws.py holds the documentation.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>

#include "twister.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace infinity::twister {
namespace {

using Words = nb::ndarray<uint32_t, nb::shape<kWords>, nb::c_contig, nb::device::cpu>;

uint64_t count_words_on(const Words& words, uint64_t place, uint64_t count) {
    auto& all = *reinterpret_cast<uint32_t (*)[kWords]>(words.data());
    if (place > kWords) throw nb::value_error("the place is not among the words");
    const nb::gil_scoped_release without_gil;
    return count_on(all, place, count);
}

}  // namespace
}  // namespace infinity::twister

NB_MODULE(_twister, m) {
    m.def("count_on", &infinity::twister::count_words_on, "words"_a, "place"_a, "count"_a);
}
