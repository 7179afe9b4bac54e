// SPDX-License-Identifier: Apache-2.0
// Calls that arrive in another order on every rank: one order for all, nobody blocks, right values.
#include "call_order.h"

#include <condition_variable>
#include <string>

#include "check.h"
#include "operators_world.h"

namespace jax_ulysses::testing {
namespace {

using host::CallStatus;

// Takes the next call of `rank` and runs it; its number, or -1 if none may run.
int TakeOne(CallOrder& order, int rank, int& last, bool any_order = false) {
  last = -1;
  const CallOrder::Job job = order.Take(rank, any_order);
  if (!job) return -1;
  job();
  return last;
}

void Rules() {
  int last = -1;
  const auto job = [&last](int number) {
    return [&last, number] {
      last = number;
      return std::function<void()>([] {});
    };
  };
  const int sites[3] = {};
  const CallKey a = {1, &sites[0]}, b = {1, &sites[1]}, again = {2, &sites[0]};
  CallOrder order(2);
  JU_CHECK(TakeOne(order, 0, last) == -1);
  // Rank 0 brings a, b; rank 1 brings b first and has to hold it back.
  order.Arrive(0, a, job(0));
  order.Arrive(0, b, job(1));
  order.Arrive(1, b, job(11));
  JU_CHECK(TakeOne(order, 1, last) == -1);
  JU_CHECK(TakeOne(order, 0, last) == 0);
  JU_CHECK(TakeOne(order, 0, last) == -1);  // busy
  order.Finish(0);
  JU_CHECK(TakeOne(order, 0, last) == 1);
  order.Finish(0);
  order.Arrive(1, a, job(10));
  JU_CHECK(TakeOne(order, 1, last) == 10);
  order.Finish(1);
  JU_CHECK(TakeOne(order, 1, last) == 11);
  order.Finish(1);
  // The same place twice in one run (a loop), and in another run.
  order.Arrive(1, a, job(20));
  order.Arrive(1, a, job(21));
  order.Arrive(0, again, job(32));
  order.Arrive(0, a, job(30));
  order.Arrive(0, a, job(31));
  for (int expected : {30, 31, 32}) {
    JU_CHECK(TakeOne(order, 0, last) == expected);
    order.Finish(0);
  }
  JU_CHECK(TakeOne(order, 1, last) == 20);
  order.Finish(1);
  JU_CHECK(TakeOne(order, 1, last) == 21);
  order.Finish(1);
  JU_CHECK(TakeOne(order, 1, last) == -1);
  // A closed line hands out what is here, whatever it waits for.
  JU_CHECK(order.Arrive(1, b, job(41)));
  JU_CHECK(TakeOne(order, 1, last) == -1);
  JU_CHECK(TakeOne(order, 1, last, /*any_order=*/true) == 41);
  // Calls that the other rank has not brought, and will not.
  JU_CHECK((order.End() == std::vector<int64_t>{2, 1}));
  JU_CHECK(!order.Arrive(0, again, job(50)));
}

// Counts down calls that have ended, and keeps what they ended with.
struct Latch {
  std::mutex mutex;
  std::condition_variable ended;
  int open = 0;
  std::vector<CallStatus> statuses;

  void Add(const CallStatus& status) {
    std::lock_guard<std::mutex> lock(mutex);
    statuses.push_back(status);
    --open;
    ended.notify_all();
  }
  void Wait() {
    std::unique_lock<std::mutex> lock(mutex);
    ended.wait(lock, [this] { return open == 0; });
  }
};

constexpr int kRanks = 4;
constexpr int kCalls = 3;

struct Call {
  Floats in;
  Floats out;
};

// Submits scatter number `call` of `rank`; all have the same shape, so only the order can tell.
void SubmitScatter(const RankHandle& handle, const Problem& p, const CallKey& key, Call& data,
                   Latch& latch) {
  host::ExchangeArgs args;
  args.shape = p.shape();
  args.in[0] = reinterpret_cast<const char*>(data.in.data());
  args.out[0] = reinterpret_cast<char*>(data.out.data());
  Submit(handle, key, [handle, args, &latch] {
    const CallStatus status = host::RunExchange(handle, args);
    return [status, &latch] { latch.Add(status); };
  });
}

Problem SmallProblem() {
  Problem p;
  p.exchange.num_ranks = kRanks;
  p.exchange.head_dim = 3;
  p.exchange.local_tokens = 20;
  p.exchange.num_segments = 1;
  p.exchange.heads[0] = 4;
  return p;
}

void Shuffled() {
  const Problem p = SmallProblem();
  const int sites[kCalls] = {};
  CreateGroup(Config(700, kRanks, 20000));
  std::vector<Call> calls(kRanks * kCalls);
  for (int run = 0; run < Scaled(60); ++run) {
    Latch latch;
    latch.open = kRanks * kCalls;
    std::vector<Floats> global(kCalls);
    for (int c = 0; c < kCalls; ++c) {
      global[c] = Numbers(static_cast<size_t>(p.length() * p.columns()), 10 * run + c);
    }
    std::vector<std::thread> threads;
    for (int rank = 0; rank < kRanks; ++rank) {
      threads.emplace_back([&, rank] {
        const RankHandle handle = FindRank(700, rank);
        for (int i = 0; i < kCalls; ++i) {
          const int c = (i * (rank % 2 + 1) + rank + run) % kCalls;
          Call& data = calls[rank * kCalls + c];
          data.in = p.SequenceShard(global[c], p.columns(), rank);
          data.out.assign(static_cast<size_t>(p.length() * p.exchange.packed_columns()), 1e9f);
          SubmitScatter(handle, p, {run, &sites[c]}, data, latch);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    latch.Wait();
    for (const CallStatus& status : latch.statuses) JU_CHECK(status.ok());
    for (int rank = 0; rank < kRanks; ++rank) {
      for (int c = 0; c < kCalls; ++c) {
        JU_CHECK(calls[rank * kCalls + c].out == p.HeadShard(global[c], 0, rank));
      }
    }
  }
  DestroyGroup(700);
}

// A call that the other ranks never make ends by the deadline, and with it all that it held back.
void NeverMade(bool destroyed) {
  const Problem p = SmallProblem();
  const int sites[2] = {};
  CreateGroup(Config(701, kRanks, destroyed ? 20000 : 200));
  Latch latch;
  latch.open = kRanks + 1;
  std::vector<Call> calls(kRanks + 1);
  for (Call& call : calls) {
    call.in = Numbers(static_cast<size_t>(p.tokens() * p.columns()), 1);
    call.out.resize(static_cast<size_t>(p.length() * p.exchange.packed_columns()));
  }
  const RankHandle first = FindRank(701, 0);
  SubmitScatter(first, p, {1, &sites[1]}, calls[kRanks], latch);
  for (int rank = 0; rank < kRanks; ++rank) {
    SubmitScatter(FindRank(701, rank), p, {1, &sites[0]}, calls[rank], latch);
  }
  if (destroyed) DestroyGroup(701);
  latch.Wait();
  for (const CallStatus& status : latch.statuses) {
    JU_CHECK(status.error == host::CallError::kAborted);
    JU_CHECK(status.text.find(destroyed ? "was destroyed" : "deadline of 200 ms") !=
             std::string::npos);
  }
  if (!destroyed) DestroyGroup(701);
}

}  // namespace
}  // namespace jax_ulysses::testing

int main() {
  jax_ulysses::testing::Rules();
  jax_ulysses::testing::Shuffled();
  jax_ulysses::testing::NeverMade(false);
  jax_ulysses::testing::NeverMade(true);
  return jax_ulysses::testing::Finish("call_order_test");
}
