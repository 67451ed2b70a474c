// Exchanges between the lanes of a warp.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "block.h"

namespace shim {

namespace {

constexpr unsigned kPoison = 0xFFFFFFFF;  // a NaN, too

bool has(unsigned mask, unsigned lane) { return lane < kWarp && (mask >> lane & 1u) != 0; }

std::string in_hex(unsigned mask) {
  char text[11];
  std::snprintf(text, sizeof(text), "0x%08X", mask);
  return text;
}

}  // namespace

void Lane::exchange(Place at, unsigned mask_, unsigned source_, unsigned bits_) {
  state = kExchanging;
  place = at;
  mask = mask_;
  source = source_;
  bits = bits_;
  ++exchanges;
}

void Lane::wait_at_barrier(Place at, int number) {
  state = kAtBarrier;
  place = at;
  barrier = number;
}

bool Warp::settle() {
  bool settled = false;
  for (unsigned i = 0; i < kWarp; ++i) {
    const Lane& lane = lanes[i];
    if (lane.state != Lane::kExchanging || !has(lane.mask, i)) continue;
    const unsigned awaited = lane.mask & ~in_state(Lane::kReturned), group = together_with(lane);
    if (awaited != (lane.mask & group)) continue;
    complete(awaited);
    settled = true;
  }
  return settled;
}

void Warp::open_barrier(int number) {
  for (Lane& lane : lanes) {
    if (lane.state == Lane::kAtBarrier && lane.barrier == number) lane.state = Lane::kRunning;
  }
}

unsigned Warp::in_state(Lane::State state) const {
  unsigned mask = 0;
  for (unsigned i = 0; i < kWarp; ++i) mask |= static_cast<unsigned>(lanes[i].state == state) << i;
  return mask;
}

// The lanes that wait for the same exchange as `lane` does.
unsigned Warp::together_with(const Lane& lane) const {
  unsigned mask = 0;
  for (unsigned i = 0; i < kWarp; ++i) {
    const Lane& other = lanes[i];
    const bool together = other.state == Lane::kExchanging && other.mask == lane.mask &&
                          other.place.line == lane.place.line && std::strcmp(other.place.file, lane.place.file) == 0;
    mask |= static_cast<unsigned>(together) << i;
  }
  return mask;
}

void Warp::complete(unsigned group) {
  unsigned handed[kWarp];
  unsigned odd = 0;
  for (unsigned i = 0; i < kWarp; ++i) {
    handed[i] = has(group, i) ? lanes[i].bits : kPoison;
    odd |= lanes[i].exchanges % 2 << i;
  }
  for (unsigned i = 0; i < kWarp; ++i) {
    if (!has(group, i)) continue;
    lanes[i].bits = has(group, lanes[i].source) ? handed[lanes[i].source] : kPoison;
    lanes[i].state = Lane::kRunning;
    lanes[i].group = group;
    lanes[i].odd = odd;
  }
}

std::string Warp::check() const {
  if (in_state(Lane::kRunning) != 0 || in_state(Lane::kExchanging) == 0) return "";
  const auto exchanging = [](const Lane& lane) { return lane.state == Lane::kExchanging; };
  const Lane& first = *std::find_if(lanes.begin(), lanes.end(), exchanging);
  const unsigned missing = first.mask & ~in_state(Lane::kReturned) & ~together_with(first);
  std::string text = "divergent exchange in a warp: " + describe(first.place) + " for lanes " + in_hex(first.mask);
  for (unsigned i = 0; i < kWarp; ++i) {
    if (!has(missing, i)) continue;
    text += ", " + describe(lanes[i].place);
    if (lanes[i].state == Lane::kExchanging) text += " for lanes " + in_hex(lanes[i].mask);
    return text;
  }
  return text + ", not its own";
}

unsigned warps_of_block() { return (blockDim.x * blockDim.y + kWarp - 1) / kWarp; }

}  // namespace shim
