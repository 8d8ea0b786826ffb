// Hyper-parameters as the user gave them (fp64), and their folding to the kernels' constants.
#pragma once

#include <cstdint>
#include <variant>

#include "formats.hpp"

namespace infinity::cpu_adam {

// Adam with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101, algorithm 2) or with
// L2 regularisation (Kingma and Ba, arXiv:1412.6980, algorithm 1, with the decay added to the
// gradient). `step` counts from 1: it is the number of updates, this one included.
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

// SGD as torch.optim.SGD defines it. On the first step the momentum buffer becomes the gradient,
// without dampening.
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

// Lion (Chen et al., 2023, arXiv:2302.06675, algorithm 2), with decoupled weight decay.
struct LionHyper {
    double lr;
    double beta1;
    double beta2;
    double weight_decay;
    bool maximize;
};

using Hyper = std::variant<AdamHyper, SgdHyper, AdagradHyper, LionHyper>;

// Checks the ranges (ConfigError), computes every constant in fp64 and rounds it once. `scale`
// multiplies the gradient: unscaling times clipping. It may have any value, since a non-finite
// scale belongs to a step that the caller asked for.
Folded fold(const Hyper& hyper, double scale);

bool uses_first_moment(Rule rule);
bool uses_second_moment(Rule rule);

}  // namespace infinity::cpu_adam
