// Hyper-parameters as the user gave them (fp64), and their folding into the kernels' constants.
#pragma once

#include <cstdint>
#include <variant>

#include "formats.hpp"

namespace infinity::cpu_adam {

// Adam with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101, algorithm 2) or with
// L2 (Kingma and Ba, arXiv:1412.6980, algorithm 1, the decay added to the gradient). `step` counts
// from 1: it is the number of updates after this one.
struct AdamHyper {
    bool decoupled;
    double lr;
    double beta1;
    double beta2;
    double eps;
    double weight_decay;
    int64_t step;
    bool maximize;
};

// SGD as torch.optim.SGD defines it: on the first step the momentum buffer becomes the gradient,
// undamped.
struct SgdHyper {
    double lr;
    double momentum;
    double dampening;
    double weight_decay;
    bool nesterov;
    bool first_step;
    bool maximize;
};

// Adagrad (Duchi, Hazan and Singer, 2011) with torch.optim.Adagrad's learning rate decay.
struct AdagradHyper {
    double lr;
    double lr_decay;
    double eps;
    double weight_decay;
    int64_t step;
    bool maximize;
};

using Hyper = std::variant<AdamHyper, SgdHyper, AdagradHyper>;

// Checks the ranges (ConfigError) and computes every constant in fp64 before it is rounded once.
// `scale` multiplies the gradient: unscaling times clipping. Any value is taken, for a non-finite
// one belongs to a step that the caller asked for.
Folded fold(const Hyper& hyper, double scale);

bool uses_first_moment(Rule rule);
bool uses_second_moment(Rule rule);

}  // namespace infinity::cpu_adam
