#include "hyper.hpp"

#include <cmath>
#include <string>

#include "errors.hpp"
#include "float_mode.hpp"

namespace infinity::cpu_adam {
namespace {

void refuse(const char* name, double value, const char* range) {
    throw ConfigError(
        std::string(name) + " is " + std::to_string(value) + ", which is not " + range + ".",
        std::string("Give a ") + name + " that is " + range + ".");
}

void check_non_negative(const char* name, double value) {
    if (!(value >= 0) || !std::isfinite(value)) refuse(name, value, "finite and at least 0");
}

void check_beta(const char* name, double value) {
    if (!(value >= 0 && value < 1)) refuse(name, value, "in [0, 1)");
}

void check_step(int64_t step) {
    if (step < 1) refuse("step", static_cast<double>(step), "at least 1");
}

float signed_scale(double scale, bool maximize) {
    return static_cast<float>(maximize ? -scale : scale);
}

Folded fold_one(const AdamHyper& h, double scale) {
    check_non_negative("lr", h.lr);
    check_beta("beta1", h.beta1);
    check_beta("beta2", h.beta2);
    check_non_negative("eps", h.eps);
    check_non_negative("weight_decay", h.weight_decay);
    check_step(h.step);
    const double step = static_cast<double>(h.step);
    const double correction1 = 1.0 - std::pow(h.beta1, step);
    const double correction2 = 1.0 - std::pow(h.beta2, step);
    const double w1 = 1.0 - h.beta1;
    const double w2 = 1.0 - h.beta2;
    Folded f{};
    f.lerp_from_grad = w1 >= 0.5;
    f.decay_from_one = w2 < 0.5;
    if (f.lerp_from_grad || !f.decay_from_one) {
        f.rule = h.decoupled ? Rule::kAdamWSmallBeta : Rule::kAdamSmallBeta;
    } else {
        f.rule = h.decoupled ? Rule::kAdamW : Rule::kAdam;
    }
    f.scale = signed_scale(scale, h.maximize);
    f.weight_decay = static_cast<float>(h.decoupled ? h.lr * h.weight_decay : h.weight_decay);
    f.step_size = static_cast<float>(h.lr / correction1);
    f.lerp = static_cast<float>(f.lerp_from_grad ? -h.beta1 : w1);
    f.grad_weight = static_cast<float>(w2);
    f.keep_weight = static_cast<float>(f.decay_from_one ? -w2 : h.beta2);
    f.root_scale = static_cast<float>(1.0 / std::sqrt(correction2));
    f.eps = static_cast<float>(h.eps);
    return f;
}

Folded fold_one(const SgdHyper& h, double scale) {
    check_non_negative("lr", h.lr);
    check_non_negative("momentum", h.momentum);
    check_non_negative("weight_decay", h.weight_decay);
    if (!std::isfinite(h.dampening)) refuse("dampening", h.dampening, "finite");
    if (h.nesterov && (h.momentum <= 0 || h.dampening != 0)) {
        throw ConfigError("Nesterov momentum was asked for with momentum " +
                              std::to_string(h.momentum) + " and dampening " +
                              std::to_string(h.dampening) + ".",
                          "Give a momentum above 0 and a dampening of 0, or nesterov=False.");
    }
    Folded f{};
    f.rule = h.momentum != 0 ? Rule::kSgdMomentum : Rule::kSgd;
    f.first_step = h.first_step;
    f.nesterov = h.nesterov;
    f.scale = signed_scale(scale, h.maximize);
    f.weight_decay = static_cast<float>(h.weight_decay);
    f.step_size = static_cast<float>(h.lr);
    f.lerp = static_cast<float>(1.0 - h.dampening);
    f.momentum = static_cast<float>(h.momentum);
    return f;
}

Folded fold_one(const AdagradHyper& h, double scale) {
    check_non_negative("lr", h.lr);
    check_non_negative("lr_decay", h.lr_decay);
    check_non_negative("eps", h.eps);
    check_non_negative("weight_decay", h.weight_decay);
    check_step(h.step);
    Folded f{};
    f.rule = Rule::kAdagrad;
    f.scale = signed_scale(scale, h.maximize);
    f.weight_decay = static_cast<float>(h.weight_decay);
    f.step_size = static_cast<float>(h.lr / (1.0 + static_cast<double>(h.step - 1) * h.lr_decay));
    f.eps = static_cast<float>(h.eps);
    return f;
}

Folded fold_one(const LionHyper& h, double scale) {
    check_non_negative("lr", h.lr);
    check_beta("beta1", h.beta1);
    check_beta("beta2", h.beta2);
    check_non_negative("weight_decay", h.weight_decay);
    Folded f{};
    f.rule = Rule::kLion;
    f.scale = signed_scale(scale, h.maximize);
    f.weight_decay = static_cast<float>(h.lr * h.weight_decay);
    f.step_size = static_cast<float>(h.lr);
    f.momentum = static_cast<float>(h.beta1);
    f.lerp = static_cast<float>(1.0 - h.beta1);
    f.keep_weight = static_cast<float>(h.beta2);
    f.grad_weight = static_cast<float>(1.0 - h.beta2);
    return f;
}

}  // namespace

Folded fold(const Hyper& hyper, double scale) {
    const DefaultFloatMode float_mode;
    return std::visit([scale](const auto& h) { return fold_one(h, scale); }, hyper);
}

bool uses_first_moment(Rule rule) { return rule != Rule::kSgd && rule != Rule::kAdagrad; }

bool uses_second_moment(Rule rule) {
    return rule != Rule::kSgd && rule != Rule::kSgdMomentum && rule != Rule::kLion;
}

}  // namespace infinity::cpu_adam
