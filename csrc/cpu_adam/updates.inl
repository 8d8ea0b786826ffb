// Every update, by its rule and formats. Needs kernels.inl.

namespace infinity::cpu_adam {
namespace {

template <Rule>
struct RuleOf;
template <>
struct RuleOf<Rule::kAdamW> {
    using Type = Adam<true, false>;
};
template <>
struct RuleOf<Rule::kAdamWSmallBeta> {
    using Type = Adam<true, true>;
};
template <>
struct RuleOf<Rule::kAdam> {
    using Type = Adam<false, false>;
};
template <>
struct RuleOf<Rule::kAdamSmallBeta> {
    using Type = Adam<false, true>;
};
template <>
struct RuleOf<Rule::kSgd> {
    using Type = Sgd<false>;
};
template <>
struct RuleOf<Rule::kSgdMomentum> {
    using Type = Sgd<true>;
};
template <>
struct RuleOf<Rule::kAdagrad> {
    using Type = Adagrad;
};
template <>
struct RuleOf<Rule::kLion> {
    using Type = Lion;
};

// The type of moments in a format. kKeeps: whether the rule keeps any moments. If it keeps none,
// the format does not matter.
template <MomentFormat, bool kKeeps>
struct MomentsOf {
    using Type = MomentsF32;
};
template <>
struct MomentsOf<MomentFormat::kBf16, true> {
    using Type = MomentsBf16;
};
template <>
struct MomentsOf<MomentFormat::kInt8, true> {
    using Type = MomentsInt8;
};

template <Rule K, Dtype D, ParameterFormat P, MomentFormat M>
struct UpdateOf {
    using R = typename RuleOf<K>::Type;
    using Moments = typename MomentsOf<M, R::kFirst || R::kSecond>::Type;
    static bool run(const UpdateArrays& arrays, const Folded& folded, const Range& range) {
        return update<R, D, P, Moments>(arrays, arrays, folded, range);
    }
};

}  // namespace
}  // namespace infinity::cpu_adam
