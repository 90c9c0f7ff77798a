/* The fabric's protocol (include/penstock/fabric/protocol.h): ranks x chunks x two calls in flight
 * over engines that deliver in order per peer and in any order across peers; buffer reuse by
 * consumed words; one deadline that may pass at any wait; abort words; rearm.
 *
 * Checked: no rank ever reads data of another epoch (asserts in Receiver), signal words never go
 * back (assert in Engine), and every run ends (no invalid end state): a fault reaches every wait,
 * and after the rearm all calls complete.
 *
 * Seeded bugs, each of which must be found: -DBUG_SIGNAL_FIRST, -DBUG_REUSE, -DBUG_ABORT_MISSED,
 * -DBUG_CONSUMED_KEPT. tools/check_protocol.sh runs them all.
 *
 * Ruled out: leaving the engines' queues undrained at a rearm (no quiesce) breaks nothing here, over
 * all 12.5 million states of two ranks: an engine stays in order per peer, so what is late still
 * comes before what is new. The code drains them all the same, because a window may be closed next.
 *
 * tests/fabric/protocol_test.cpp compares the constants and formulas below with the code's. */

#define CALLS_IN_FLIGHT 2
#define NO_EPOCH 0
#define FIRST_GENERATION 1
#define PARITY(e) ((e) % CALLS_IN_FLIGHT)
#define REUSE(e) ((e) > CALLS_IN_FLIGHT -> (e) - CALLS_IN_FLIGHT : NO_EPOCH)

#ifndef RANKS
#define RANKS 2
#endif
#ifndef CHUNKS
#define CHUNKS 2
#endif
/* Three calls reach the reuse of a buffer; after a rearm two touch both buffers again. */
#ifndef CALLS
#define CALLS 3
#endif
#ifndef CALLS_AFTER
#define CALLS_AFTER 2
#endif
#define ALL_RANKS ((1 << RANKS) - 1)

#define PAIR(a, b) ((a) * RANKS + (b))
#define SLOT(a, b, e, c) ((PAIR(a, b) * CALLS_IN_FLIGHT + PARITY(e)) * CHUNKS + (c))
#define ABORTED(r) (abort_word[r] >= generation[r])

mtype = { DATA, SIGNAL };

byte staging[RANKS * RANKS * CALLS_IN_FLIGHT * CHUNKS]; /* at the source, [source][peer] */
byte data[RANKS * RANKS * CALLS_IN_FLIGHT * CHUNKS];    /* at the peer, [peer][source] */
byte arrived[RANKS * RANKS];                            /* at the peer, [peer][source] */
byte consumed[RANKS * RANKS];                           /* at the source, [source][peer] */
byte abort_word[RANKS];
byte generation[RANKS];
byte highest[RANKS]; /* last epoch that a rank has begun */
byte floor_of[RANKS];
byte reached[RANKS]; /* generation after a rearm */
byte rearm_mask;
bool sender_stopped[RANKS];
bool done[RANKS];
bool busy[RANKS * RANKS];
#ifdef NO_FAULT
bool deadline_passed = true;
#else
bool deadline_passed; /* the model lets one deadline pass, at any wait that is still short */
#endif

chan ring[RANKS * RANKS] = [CALLS_IN_FLIGHT * (CHUNKS + 1)] of { mtype, byte, byte };

#if RANKS == 2
#define ALL_DONE (done[0] && done[1])
#define ALL_REACHED(g) (reached[0] >= g && reached[1] >= g)
#else
#define ALL_DONE (done[0] && done[1] && done[2])
#define ALL_REACHED(g) (reached[0] >= g && reached[1] >= g && reached[2] >= g)
#endif

/* One word after the other, as the code does. */
inline raise(r, i) {
  i = 0;
  do
  :: i < RANKS -> abort_word[i] = generation[r]; i++
  :: else -> i = 0; break
  od
}

/* Transport direct (-DDIRECT): the sender stores by itself, no engine is between. That makes three
 * ranks small enough to be visited whole (14.8 million states with a fault and a rearm). */
#ifdef DIRECT
#define ROOM(r, p) true
#define FULL(r, p) false
inline send_data(r, p, e, c) { data[SLOT(p, r, e, c)] = e }
inline send_signal(r, p, e) {
  d_step {
    assert(arrived[PAIR(p, r)] <= e);
    arrived[PAIR(p, r)] = e
  }
}
#else
#define ROOM(r, p) nfull(ring[PAIR(r, p)])
#define FULL(r, p) full(ring[PAIR(r, p)])
inline send_data(r, p, e, c) {
  staging[SLOT(r, p, e, c)] = e;
  ring[PAIR(r, p)]!DATA, c, e
}
inline send_signal(r, p, e) { ring[PAIR(r, p)]!SIGNAL, 0, e }
#endif

proctype Engine(byte s; byte d) {
  byte c, e;
  mtype kind;
end:
  do
  :: atomic {
       !ABORTED(s) && nempty(ring[PAIR(s, d)]) ->
       ring[PAIR(s, d)]?kind, c, e;
       busy[PAIR(s, d)] = true
     };
     /* An abort that comes now does not call this copy back: quiesce waits for it. */
     if
     :: kind == DATA -> data[SLOT(d, s, e, c)] = staging[SLOT(s, d, e, c)]
     :: kind == SIGNAL ->
        d_step {
          assert(arrived[PAIR(d, s)] <= e);
          arrived[PAIR(d, s)] = e
        }
     fi;
     d_step { busy[PAIR(s, d)] = false; c = 0; e = 0; kind = DATA }
  :: atomic {
       ABORTED(s) && nempty(ring[PAIR(s, d)]) ->
       ring[PAIR(s, d)]?_, _, _
     }
  od
}

proctype Sender(byte r) {
  byte e = 1, last = CALLS, p = 0, c = 0;
again:
  do
  :: e > last -> break
  :: else ->
     atomic { highest[r] = e; p = 0 };
     do
     :: p == RANKS -> break
     :: p < RANKS && p == r -> p++
     :: p < RANKS && p != r ->
#ifndef BUG_REUSE
        if
        :: consumed[PAIR(r, p)] >= REUSE(e)
        :: ABORTED(r) -> goto stop
        :: atomic { !deadline_passed && consumed[PAIR(r, p)] < REUSE(e) -> deadline_passed = true };
           raise(r, c);
           goto stop
        fi;
#endif
#ifdef BUG_SIGNAL_FIRST
        if
        :: atomic { ROOM(r, p) -> send_signal(r, p, e) }
        :: ABORTED(r) -> goto stop
        fi;
#endif
        c = 0;
        do
        :: c == CHUNKS -> c = 0; break
        :: c < CHUNKS ->
           if
           :: atomic {
                ROOM(r, p) ->
                send_data(r, p, e, c);
                c++
              }
           :: FULL(r, p) && ABORTED(r) -> goto stop
           fi
        od;
#ifndef BUG_SIGNAL_FIRST
        if
        :: atomic { ROOM(r, p) -> send_signal(r, p, e) }
        :: FULL(r, p) && ABORTED(r) -> goto stop
        fi;
#endif
        p++
     od;
     e++
  od;
  if
  :: ALL_DONE -> goto end
  :: ABORTED(r) -> goto stop
  fi;
stop:
  atomic { c = 0; p = 0; sender_stopped[r] = true };
  !sender_stopped[r];
  e = floor_of[r] + 1;
  last = floor_of[r] + CALLS_AFTER;
  goto again;
end:
  skip
}

proctype Receiver(byte r) {
  byte e = 1, last = CALLS, p = 0, c = 0;
again:
  do
  :: e > last -> break
  :: else ->
     p = 0;
     do
     :: p == RANKS -> break
     :: p < RANKS && p == r -> p++
     :: p < RANKS && p != r ->
        if
        :: arrived[PAIR(r, p)] >= e
#ifndef BUG_ABORT_MISSED
        :: ABORTED(r) -> goto stop
#endif
        :: atomic { !deadline_passed && arrived[PAIR(r, p)] < e -> deadline_passed = true };
           raise(r, c);
           goto stop
        fi;
        c = 0;
        do
        :: c == CHUNKS -> c = 0; break
        :: atomic { c < CHUNKS -> assert(data[SLOT(r, p, e, c)] == e); c++ }
        od;
        atomic { consumed[PAIR(p, r)] = e; p++ }
     od;
     e++
  od;
  done[r] = true;
  if
  :: ALL_DONE -> goto end
  :: ABORTED(r) -> goto stop
  fi;
stop:
  c = 0;
  /* quiesce: this rank's sender has stopped and its engines are idle and empty */
  sender_stopped[r];
  p = 0;
  do
  :: p == RANKS -> break
  :: p < RANKS -> empty(ring[PAIR(r, p)]) && !busy[PAIR(r, p)]; p++
  od;
  rearm_mask = rearm_mask | (1 << r);
  rearm_mask == ALL_RANKS;
  d_step {
    p = 0;
    floor_of[r] = 0;
    do
    :: p == RANKS -> break
    :: p < RANKS ->
       if
       :: highest[p] > floor_of[r] -> floor_of[r] = highest[p]
       :: else
       fi;
       p++
    od;
#ifndef BUG_CONSUMED_KEPT
    p = 0;
    do
    :: p == RANKS -> break
    :: p < RANKS -> consumed[PAIR(r, p)] = floor_of[r]; p++
    od;
#endif
    p = 0;
    done[r] = false
  };
  generation[r]++;
  reached[r] = generation[r];
  ALL_REACHED(generation[r]);
  e = floor_of[r] + 1;
  last = floor_of[r] + CALLS_AFTER;
  sender_stopped[r] = false;
  goto again;
end:
  skip
}

init {
  byte r = 0, p = 0;
  atomic {
    do
    :: r == RANKS -> break
    :: r < RANKS -> generation[r] = FIRST_GENERATION; reached[r] = FIRST_GENERATION; r++
    od;
    r = 0;
    do
    :: r == RANKS -> break
    :: r < RANKS ->
       run Sender(r);
       run Receiver(r);
       p = 0;
       do
       :: p == RANKS -> break
       :: p < RANKS && p == r -> p++
       :: p < RANKS && p != r ->
#ifndef DIRECT
          run Engine(r, p);
#endif
          p++
       od;
       r++
    od
  }
}
