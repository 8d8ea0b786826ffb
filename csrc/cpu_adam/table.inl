// The table of an instruction set's kernels, made by the kernels_<isa>.cpp that includes its Vec,
// kernels.inl and then this.

#include "updates.inl"

namespace infinity::cpu_adam {
namespace {

template <Rule K, Dtype D, ParameterFormat P, MomentFormat M>
constexpr UpdateKernel update_kernel() {
    using U = UpdateOf<K, D, P, M>;
    return update<typename U::R, D, P, typename U::Moments>;
}

template <Rule K, Dtype D, ParameterFormat P>
constexpr void fill_moments(UpdateKernel (&row)[kMomentFormats]) {
    row[0] = update_kernel<K, D, P, MomentFormat::kF32>();
    row[1] = update_kernel<K, D, P, MomentFormat::kBf16>();
    row[2] = update_kernel<K, D, P, MomentFormat::kInt8>();
}

template <Rule K, Dtype D>
constexpr void fill_formats(UpdateKernel (&rows)[kParameterFormats][kMomentFormats]) {
    fill_moments<K, D, ParameterFormat::kPlain>(rows[0]);
    fill_moments<K, D, ParameterFormat::kPlainF32>(rows[1]);
    fill_moments<K, D, ParameterFormat::kPlainBf16>(rows[2]);
    fill_moments<K, D, ParameterFormat::kPlainF16>(rows[3]);
    fill_moments<K, D, ParameterFormat::kSplit>(rows[4]);
}

template <Rule K>
constexpr void fill_dtypes(KernelTable& table) {
    auto& rows = table.update[static_cast<int>(K)];
    fill_formats<K, Dtype::kF32>(rows[0]);
    fill_formats<K, Dtype::kBf16>(rows[1]);
    fill_formats<K, Dtype::kF16>(rows[2]);
}

constexpr KernelTable make_table(const char* name, StreamKernel stream) {
    KernelTable table{};
    table.name = name;
    fill_dtypes<Rule::kAdamW>(table);
    fill_dtypes<Rule::kAdamWSmallBeta>(table);
    fill_dtypes<Rule::kAdam>(table);
    fill_dtypes<Rule::kAdamSmallBeta>(table);
    fill_dtypes<Rule::kSgd>(table);
    fill_dtypes<Rule::kSgdMomentum>(table);
    fill_dtypes<Rule::kAdagrad>(table);
    fill_dtypes<Rule::kLion>(table);
    table.average[0] = average<ParameterFormat::kPlain>;
    table.average[1] = average<ParameterFormat::kPlainF32>;
    table.average[2] = average<ParameterFormat::kPlainBf16>;
    table.average[3] = average<ParameterFormat::kPlainF16>;
    table.average[4] = average<ParameterFormat::kSplit>;
    table.gradient[0] = gradient<Dtype::kF32>;
    table.gradient[1] = gradient<Dtype::kBf16>;
    table.gradient[2] = gradient<Dtype::kF16>;
    table.stream = stream;
    return table;
}

}  // namespace
}  // namespace infinity::cpu_adam
