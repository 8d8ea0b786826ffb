// The arguments of launches on the device: plain structs that infinity/device_update/table.py
// packs.
//
// [Note: device tables] The places of all parameters' pieces are the same in every step, so they
// are written once into the device's memory. Hyper-parameters, seeds, and the set of parameters
// that have an update change with each step. They come with the launch, by value, so that nothing
// has to be kept until the device has read it.
#pragma once

#include "formats.hpp"

namespace infinity::cpu_adam {

// The number of elements that a warp updates.
constexpr uint32_t kTile = 1024;
static_assert(kTile % kCodeBlock == 0);

// The part of a parameter that lies in one chunk of its unit's pages.
struct DevicePiece {
    UpdateArrays arrays;  // the arrays of the chunk
    uint32_t start;       // index of the piece's first element in the arrays
    uint32_t count;       // elements
    uint32_t index;       // index of the first element in its parameter, modulo 2^32
    uint32_t parameter;   // number of the parameter in the table
    Dtype gradient;
    ParameterFormat format;
    MomentFormat moments;
    uint32_t index_high;  // the same index, divided by 2^32
};
static_assert(sizeof(DevicePiece) == 96);

constexpr uint32_t kMostHypers = 16;
constexpr uint32_t kMostParameters = 256;
constexpr uint8_t kNoUpdate = 255;
constexpr uint32_t kMostPieces = 28;

static_assert(sizeof(Folded) == 44);

// Updates the parameters [first_parameter, first_parameter + kMostParameters), as far as their
// pieces are among [first_piece, end_piece). Each warp updates one tile.
struct UpdateLaunch {
    const DevicePiece* pieces;
    const uint32_t* tiles_before;  // tiles before each piece and, at the end, all tiles
    const uint32_t* stop;          // nothing is updated if this is not 0; null: always
    // The whole gradient of each parameter, or null: its pieces lie in the arrays of their chunks.
    const void* gradients[kMostParameters];
    uint32_t first_piece;
    uint32_t end_piece;
    uint32_t first_parameter;
    Folded hypers[kMostHypers];
    uint32_t seeds[kMostParameters];
    uint8_t hyper[kMostParameters];  // index of the hyper-parameters, or kNoUpdate
};
// The most bytes of arguments that every device takes by value.
constexpr uint32_t kMostArguments = 4096;
static_assert(sizeof(UpdateLaunch) <= kMostArguments);

// Updates pieces whose arrays lie elsewhere in every step. Each warp updates one tile.
struct PiecesLaunch {
    DevicePiece pieces[kMostPieces];
    uint32_t tiles_before[kMostPieces + 1];  // as in UpdateLaunch
    uint32_t count;                          // pieces
    Folded hypers[kMostHypers];
    uint32_t seeds[kMostPieces];
    uint8_t hyper[kMostPieces];  // index of the hyper-parameters
};
static_assert(sizeof(PiecesLaunch) <= kMostArguments);

// Sums the squares of the gradients, block by block. Each warp sums one block.
struct SquaresLaunch {
    const DevicePiece* pieces;
    const uint32_t* blocks_before;  // blocks before each piece and, at the end, all blocks
    uint32_t pieces_count;
    double* sums;  // one sum for every block
};

// Sums the squares of one gradient, which lies anywhere, block by block. Each warp sums one block.
struct FreshSquaresLaunch {
    const void* gradient;
    double* sums;    // one sum for every block
    uint64_t count;  // elements
    uint32_t* stop;  // gets `number` if it is 0 and an element is not finite; null: nothing does
    uint32_t number;
    Dtype dtype;
};

}  // namespace infinity::cpu_adam
