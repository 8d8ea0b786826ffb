// The arithmetic of one element, for each rule. moments() changes the moments, of format M, and the
// gradient where the rule adds weight decay to it. parameter() returns the new parameter. Part of
// kernels.inl.

namespace infinity::cpu_adam {
namespace {

// kSmallBeta: for betas of at most one half, where the other form of each average is the accurate
// one.
template <bool kDecoupled, bool kSmallBeta>
struct Adam {
    static constexpr bool kFirst = true;
    static constexpr bool kSecond = true;
    explicit Adam(const Folded& h)
        : lerp_from_grad(h.lerp_from_grad),
          decay_from_one(h.decay_from_one),
          weight_decay(Vec::set(h.weight_decay)),
          step_size(Vec::set(kDecoupled ? h.step_size : -h.step_size)),
          lerp(Vec::set(h.lerp)),
          grad_weight(Vec::set(h.grad_weight)),
          keep_weight(Vec::set(h.keep_weight)),
          root_scale(Vec::set(h.root_scale)),
          eps(Vec::set(h.eps)),
          largest(Vec::set(3.402823466e+38F)) {}

    template <class M>
    INFINITY_INLINE void moments(F p, F& g, F& m, F& v) const {
        if constexpr (!kDecoupled) g = Vec::fma(weight_decay, p, g);
        m = mean(g, m);
        v = Vec::fma(Vec::mul(grad_weight, g), g, kept<M>(v));
    }
    INFINITY_INLINE F parameter(F p, F, F m, F v) const {
        const F ratio = Vec::div(m, Vec::fma(Vec::sqrt(v), root_scale, eps));
        // The whole change is computed first, so there is one rounding at the size of p.
        if constexpr (kDecoupled) {
            return Vec::sub(p, Vec::fma(weight_decay, p, Vec::mul(step_size, ratio)));
        }
        return Vec::fma(step_size, ratio, p);
    }
    // The difference gets the smaller of the two weights, so there is one rounding at the size of
    // m.
    INFINITY_INLINE F mean(F g, F m) const {
        const F difference = Vec::sub(g, m);
        if constexpr (kSmallBeta) {
            if (lerp_from_grad) return Vec::fma(lerp, difference, g);
        }
        return Vec::fma(lerp, difference, m);
    }
    // v - w v keeps the bits of w that beta2 as an fp32 would lose. The bound keeps an infinite v
    // infinite (inf - inf would be NaN).
    template <class M>
    INFINITY_INLINE F kept(F v) const {
        if constexpr (kSmallBeta) {
            if (!decay_from_one) return Vec::mul(keep_weight, v);
        }
        const F bounded = M::kInfinite ? Vec::at_most(largest, v) : v;
        return Vec::fma(keep_weight, bounded, v);
    }

    bool lerp_from_grad, decay_from_one;
    F weight_decay, step_size, lerp, grad_weight, keep_weight, root_scale, eps, largest;
};

template <bool kMomentum>
struct Sgd {
    static constexpr bool kFirst = kMomentum;
    static constexpr bool kSecond = false;
    explicit Sgd(const Folded& h)
        : first_step(h.first_step),
          nesterov(h.nesterov),
          weight_decay(Vec::set(h.weight_decay)),
          minus_step(Vec::set(-h.step_size)),
          grad_share(Vec::set(h.lerp)),
          momentum(Vec::set(h.momentum)) {}

    template <class M>
    INFINITY_INLINE void moments(F p, F& g, F& m, F&) const {
        g = Vec::fma(weight_decay, p, g);
        if constexpr (kMomentum) {
            if (first_step) {
                m = g;
            } else {
                m = Vec::fma(momentum, m, Vec::mul(grad_share, g));
            }
        }
    }
    INFINITY_INLINE F parameter(F p, F g, F m, F) const {
        if constexpr (kMomentum) {
            if (nesterov) {
                g = Vec::fma(momentum, m, g);
            } else {
                g = m;
            }
        }
        return Vec::fma(minus_step, g, p);
    }

    bool first_step, nesterov;
    F weight_decay, minus_step, grad_share, momentum;
};

struct Adagrad {
    static constexpr bool kFirst = false;
    static constexpr bool kSecond = true;
    explicit Adagrad(const Folded& h)
        : weight_decay(Vec::set(h.weight_decay)),
          minus_step(Vec::set(-h.step_size)),
          eps(Vec::set(h.eps)) {}

    template <class M>
    INFINITY_INLINE void moments(F p, F& g, F&, F& v) const {
        g = Vec::fma(weight_decay, p, g);
        v = Vec::fma(g, g, v);
    }
    INFINITY_INLINE F parameter(F p, F g, F, F v) const {
        return Vec::fma(minus_step, Vec::div(g, Vec::add(Vec::sqrt(v), eps)), p);
    }

    F weight_decay, minus_step, eps;
};

struct Lion {
    static constexpr bool kFirst = true;
    static constexpr bool kSecond = false;
    explicit Lion(const Folded& h)
        : weight_decay(Vec::set(h.weight_decay)),
          step_size(Vec::set(h.step_size)),
          momentum(Vec::set(h.momentum)),
          grad_share(Vec::set(h.lerp)),
          keep_weight(Vec::set(h.keep_weight)),
          grad_weight(Vec::set(h.grad_weight)),
          zero(Vec::set(0.0F)),
          one(Vec::as_u(Vec::set(1.0F))),
          sign_bit(Vec::set_u(0x80000000U)),
          magnitude_bits(Vec::set_u(0x7FFFFFFFU)) {}

    // The step's direction replaces the gradient. Both means are rounded as m.mul(beta).add(g,
    // alpha = 1 - beta) rounds them in PyTorch: where a mean is close to 0, a rounding decides its
    // sign.
    template <class M>
    INFINITY_INLINE void moments(F, F& g, F& m, F&) const {
        const F direction = sign(Vec::fma(grad_share, g, Vec::mul(momentum, m)));
        m = Vec::fma(grad_weight, g, Vec::mul(keep_weight, m));
        g = direction;
    }
    INFINITY_INLINE F parameter(F p, F g, F, F) const {
        return Vec::sub(p, Vec::fma(weight_decay, p, Vec::mul(step_size, g)));
    }
    // 1, -1 or 0; NaN if x is not finite, see [Note: quiet last].
    INFINITY_INLINE F sign(F x) const {
        const Vec::U bits = Vec::as_u(x);
        const Vec::U unit =
            Vec::at_least_if(Vec::and_u(bits, magnitude_bits), one, Vec::as_u(zero));
        return Vec::add(Vec::as_f(Vec::and_or(bits, sign_bit, unit)), Vec::mul(x, zero));
    }

    F weight_decay, step_size, momentum, grad_share, keep_weight, grad_weight, zero;
    Vec::U one, sign_bit, magnitude_bits;
};

}  // namespace
}  // namespace infinity::cpu_adam
