// SPDX-License-Identifier: Apache-2.0
// Pieces, roles and order of the plain exchange.
#include "jax_ulysses/exchange/exchange_order.h"

#include <set>
#include <tuple>

#include "check.h"

namespace jax_ulysses {
namespace {

// Each piece is sent once to each destination, and copied out once of each source.
void TestOrders() {
  constexpr int32_t kPieces = 5;
  for (int32_t ranks : {1, 2, 3, 8}) {
    for (int32_t first_step : {0, 1}) {
      std::set<std::tuple<int, int, int>> sent, received;
      for (int32_t rank = 0; rank < ranks; ++rank) {
        const ExchangeOrder order = {ranks, rank, kPieces, first_step};
        for (int32_t i = 0; i < order.num_sent(); ++i) {
          const ExchangeOrder::Item item = order.Sent(i);
          JU_CHECK(first_step == 0 || item.rank != rank);
          JU_CHECK(sent.insert({rank, item.rank, item.piece}).second);
        }
        for (int32_t i = 0; i < order.num_received(); ++i) {
          const ExchangeOrder::Item item = order.Received(i);
          JU_CHECK(item.piece >= 0 && item.piece < kPieces);
          JU_CHECK(received.insert({item.rank, rank, item.piece}).second);
          // The own block in place comes first, and was not sent.
          const bool own = item.rank == rank;
          JU_CHECK(first_step == 0 || own == (i < kPieces));
          if (first_step == 1 && own) sent.insert({rank, rank, item.piece});
        }
      }
      JU_CHECK(sent == received);
      JU_CHECK(static_cast<int32_t>(sent.size()) == ranks * ranks * kPieces);
    }
  }
}

void TestPieces() {
  for (int64_t ranks : {1, 2, 8}) {
    for (int64_t rows : {1, 5, 1000, 100000}) {
      for (int64_t row_bytes : {1, 378, 6144, 1 << 20}) {
        for (int64_t flags : {1, 3, 16384}) {
          const int64_t piece = ExchangePieceRows(ranks, rows, row_bytes, flags);
          JU_CHECK(piece >= 1 && (piece & (piece - 1)) == 0 && CeilDiv(rows, piece) <= flags);
          JU_CHECK(piece == 1 || piece * row_bytes <= kLargestPiece ||
                   CeilDiv(rows, piece / 2) > flags);
        }
      }
    }
  }
}

// Workers are numbered without gaps, and some warps send and some receive however few CTAs there
// are.
void TestRoles() {
  constexpr int32_t kWarps = 7, kSenders = 2;
  for (int32_t ctas = 1; ctas < 200; ++ctas) {
    const int32_t sending = ExchangeRole::SendingCtas(ctas);
    std::set<int32_t> send, receive;
    int32_t senders = 0, receivers = 0;
    for (int32_t cta = 0; cta < ctas; ++cta) {
      const ExchangeRole role = ExchangeRole::Of(cta, ctas, sending, kWarps, kSenders);
      for (int32_t w = 0; w < role.senders; ++w) JU_CHECK(send.insert(role.Worker(w)).second);
      for (int32_t w = 0; w < role.receivers; ++w) {
        JU_CHECK(receive.insert(role.Worker(w)).second);
      }
      if (role.senders > 0) senders = role.senders * role.ctas;
      if (role.receivers > 0) receivers = role.receivers * role.ctas;
    }
    JU_CHECK(senders > 0 && static_cast<int32_t>(send.size()) == senders);
    JU_CHECK(receivers > 0 && static_cast<int32_t>(receive.size()) == receivers);
    JU_CHECK(*send.begin() == 0 && *send.rbegin() == senders - 1);
    JU_CHECK(*receive.begin() == 0 && *receive.rbegin() == receivers - 1);
  }
}

}  // namespace
}  // namespace jax_ulysses

int main() {
  jax_ulysses::TestOrders();
  jax_ulysses::TestPieces();
  jax_ulysses::TestRoles();
  return jax_ulysses::testing::Finish("exchange_order_test");
}
