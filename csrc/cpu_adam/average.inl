// The running average of the fp32 masters. Part of kernels.inl.

namespace infinity::cpu_adam {
namespace {

// The formula and the roundings are those of torch.lerp: the difference gets the smaller of the two
// weights. So an average has the bits of torch's AveragedModel over fp32 parameters.
template <ParameterFormat P>
void average(const UpdateArrays& outputs, float* averages, const AverageStep& step,
             const Range& range) {
    const Parameters<P> parameters(outputs, outputs);
    const bool begins = step.begins;
    const bool from_average = step.weight < 0.5F;
    const F weight = Vec::set(from_average ? step.weight : step.weight - 1.0F);
    const auto element = [&](size_t i, auto lanes) __attribute__((always_inline)) {
        F x = parameters.load(i, lanes);
        if (!begins) {
            const F before = Vec::load(averages + i, lanes);
            x = Vec::fma(weight, Vec::sub(x, before), from_average ? before : x);
        }
        Vec::store(averages + i, Vec::quiet(x), lanes);
    };
    size_t i = range.begin;
    const size_t end = range.begin + range.count;
    for (; i + kWidth <= end; i += kWidth) element(i, Full{});
    if (i < end) element(i, Part(end - i));
}

}  // namespace
}  // namespace infinity::cpu_adam
