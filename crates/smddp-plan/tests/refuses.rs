//! Plans that are wrong in one way each are refused, for that reason, at the right place.

use smddp_plan::check::{Element, Error, Operation, Position, Sizes, check, programs};
use smddp_plan::{
    Algorithm, Association, Buffer, Channel, Collective, Program, Source, Span, Step, Timed, Topology,
};

/// A right plan that a test spoils.
struct Case {
    collective: Collective,
    programs: Vec<Program>,
    sizes: Sizes,
    in_place: bool,
    depth: usize,
}

impl Case {
    fn new(algorithm: Algorithm, collective: Collective, size: usize, segments: usize) -> Self {
        let programs = programs(algorithm, collective, &Topology::single(size), 0, false)
            .expect("the algorithm does it");
        let case = Self {
            collective,
            programs,
            sizes: Sizes::Blocks(vec![segments; size]),
            in_place: false,
            depth: 2,
        };
        assert_eq!(case.check(), Ok(()));
        case
    }

    fn check(&self) -> Result<(), Error> {
        let Self { collective, ref programs, ref sizes, in_place, depth } = *self;
        check(&Operation { collective, root: 0, programs, sizes, in_place }, depth)
    }

    fn refused(&self) -> Error {
        self.check().expect_err("the plan is wrong")
    }

    fn lane(&mut self, rank: usize) -> &mut Vec<Timed> {
        &mut self.programs[rank].lanes[0]
    }

    fn step(&mut self, rank: usize, step: usize) -> &mut Step {
        &mut self.lane(rank)[step].step
    }
}

fn place(rank: usize, step: usize, segment: usize) -> Position {
    Position { rank, step, segment, ..Position::default() }
}

fn element(rank: usize, block: usize, segment: usize) -> Element {
    Element { operation: 0, rank, block, segment }
}

/// Steps of a mesh reduce_scatter of 3: two Sends, one Reduce.
fn reduction(case: &mut Case, rank: usize) -> (&mut Vec<Source>, &mut Option<(usize, Span)>, &mut bool) {
    match case.step(rank, 2) {
        Step::Reduce { from, own, finish, .. } => (from, own, finish),
        other => panic!("{other:?}"),
    }
}

fn reduce_scatter() -> Case {
    Case::new(Algorithm::Mesh, Collective::ReduceScatter, 3, 2)
}

#[test]
fn a_missing_contributor() {
    let mut case = reduce_scatter();
    let (from, own, finish) = reduction(&mut case, 1);
    *own = None;
    *finish = false;
    assert_eq!(from.len(), 2);
    assert_eq!(case.refused(), Error::MissingContributor { element: element(1, 1, 0), contributor: 1 });
}

/// A reduce of two ranks in which the leaf adds to what the root sent it, and the root adds its own again.
fn echo(finish_at_leaf: bool) -> Case {
    let (input, output) = (Span::input(0), Span::output(0));
    let from = |rank| vec![Source { rank, channel: 0, reader: 0, message: input, take: (0, 1) }];
    let reduce = |rank, position, to, send, finish| Step::Reduce {
        from: from(rank),
        own: Some((position, input)),
        to,
        send,
        finish,
        association: Association::InOrder,
    };
    let root = vec![
        Timed { lag: 0, step: Step::Send { channel: 0, source: input, tee: None } },
        Timed { lag: 1, step: reduce(1, 0, Some(output), None, true) },
    ];
    let leaf = vec![Timed { lag: 0, step: reduce(0, 1, None, Some(0), finish_at_leaf) }];
    let to = |reader| vec![Channel { readers: vec![reader] }];
    Case {
        collective: Collective::Reduce,
        programs: vec![Program::lane(to(1), root), Program::lane(to(0), leaf)],
        sizes: Sizes::Blocks(vec![1, 0]),
        in_place: false,
        depth: 2,
    }
}

#[test]
fn a_double_contributor() {
    assert_eq!(echo(false).refused(), Error::DoubleContributor { at: place(0, 1, 0), contributor: 0 });
}

#[test]
fn a_finished_result_reduced_again() {
    assert_eq!(echo(true).refused(), Error::WrongFinish { at: place(0, 1, 0) });
}

#[test]
fn mixed_blocks() {
    let mut case = reduce_scatter();
    *reduction(&mut case, 1).1 = Some((1, Span::input(2)));
    assert_eq!(case.refused(), Error::MixedBlocks { at: place(1, 2, 0), first: 1, second: 2 });
}

#[test]
fn a_block_in_the_wrong_place() {
    let mut case = Case::new(Algorithm::Mesh, Collective::AllGather, 3, 1);
    // Rank 0 receives from 1, then 2.
    for (step, block) in [(1, 2), (2, 1)] {
        let Step::Receive { to, .. } = case.step(0, step) else { panic!() };
        *to = Span::output(block);
    }
    assert_eq!(case.refused(), Error::WrongBlock { element: element(0, 1, 0), expected: 1, found: 2 });
}

#[test]
fn a_block_that_is_never_written() {
    let mut case = Case::new(Algorithm::Mesh, Collective::AllGather, 3, 2);
    let Step::Send { tee, .. } = case.step(2, 0) else { panic!() };
    *tee = None;
    assert_eq!(case.refused(), Error::NotWritten { element: element(2, 2, 0) });
}

#[test]
fn a_block_meant_for_another_pair() {
    let mut case = Case::new(Algorithm::Mesh, Collective::AllToAll, 3, 1);
    // Rank 0 sends to rank 1 what is for rank 2, and rank 1 takes it for its own.
    let Step::Send { source, .. } = case.step(0, 0) else { panic!() };
    *source = Span::input(2);
    let Some(Step::Receive { from, .. }) = case.lane(1).iter_mut().map(|t| &mut t.step).last() else {
        panic!()
    };
    assert_eq!(from.rank, 0);
    from.message = Span::input(2);
    assert_eq!(case.refused(), Error::WrongBlock { element: element(1, 0, 0), expected: 1, found: 2 });
}

#[test]
fn a_read_before_the_write() {
    let mut case = Case::new(Algorithm::Mesh, Collective::AllGather, 3, 2);
    case.programs[1].scratch_blocks = 1;
    let Step::Send { source, .. } = case.step(1, 0) else { panic!() };
    *source = Span::scratch(0);
    let Error::ReadBeforeWrite { at: found, buffer: Buffer::Scratch, .. } = case.refused() else { panic!() };
    assert_eq!(found, place(1, 0, 0));
}

/// A scatter whose root has its own block by way of Scratch, from one lane to another: the other rank's word of its own
/// block, which was sent after the first copy, orders them.
fn two_lanes(ordered: bool) -> Case {
    let lane = |steps: Vec<Step>| steps.into_iter().map(|step| Timed { lag: 0, step }).collect();
    let (input, output, span) = (Span::input(0), Span::output(0), Span::scratch(0));
    let send = |source| Step::Send { channel: 0, source, tee: None };
    let receive =
        |rank, message, to| Step::Receive { from: Source::whole(rank, 0, 0, message), to, forward: None };
    let mut second =
        vec![receive(1, Span::TOKEN, Span::TOKEN), Step::Copy { source: span, to: output, finish: false }];
    let mut theirs = vec![receive(0, Span::input(1), Span::output(1)), send(Span::TOKEN)];
    if !ordered {
        second.remove(0);
        theirs.pop();
    }
    let first = vec![Step::Copy { source: input, to: span, finish: false }, send(Span::input(1))];
    let to = |reader| vec![Channel { readers: vec![reader] }];
    let root = Program { channels: to(1), lanes: vec![lane(first), lane(second)], scratch_blocks: 1 };
    Case {
        collective: Collective::Scatter,
        programs: vec![root, Program::lane(to(0), lane(theirs))],
        sizes: Sizes::Blocks(vec![1; 2]),
        in_place: false,
        depth: 2,
    }
}

#[test]
fn lanes_without_an_order() {
    assert_eq!(two_lanes(true).check(), Ok(()));
    let at = Position { lane: 1, ..place(0, 0, 0) };
    assert_eq!(
        two_lanes(false).refused(),
        Error::Unordered { at, buffer: Buffer::Scratch, block: 0, other: 0 }
    );
    // The overwrite: lane 0 reuses Scratch without having heard that lane 1 has read it. Which of the two uses
    // comes second is chance, that nothing orders them is not.
    let mut case = two_lanes(true);
    let copy = Step::Copy { source: Span::input(0), to: Span::scratch(0), finish: false };
    case.programs[0].lanes[0].push(Timed { lag: 0, step: copy });
    let Error::Unordered { buffer: Buffer::Scratch, block: 0, .. } = case.refused() else { panic!() };
}

#[test]
fn an_input_overwritten_before_it_is_sent() {
    // Each rank writes something else over what it is to send to its right neighbour, and only then sends it.
    let mut case = Case::new(Algorithm::Mesh, Collective::AllReduce, 3, 2);
    for rank in 0..3 {
        let to = Span::output((rank + 1) % 3);
        let copy = Step::Copy { source: Span::input(rank), to, finish: false };
        case.lane(rank).insert(0, Timed { lag: 0, step: copy });
    }
    assert_eq!(case.check(), Ok(()), "out of place nobody minds");
    case.in_place = true;
    assert_eq!(case.refused(), Error::Clobbered { at: place(0, 1, 0), block: 1 });
}

#[test]
fn a_message_that_is_not_what_the_reader_expects() {
    let mut case = Case::new(Algorithm::Mesh, Collective::Scatter, 3, 2);
    let Step::Receive { from, .. } = case.step(2, 0) else { panic!() };
    from.message = Span::input(1);
    let (expected, found) = (Span::input(1), Span::input(2));
    assert_eq!(case.refused(), Error::Message { at: place(2, 0, 0), expected, found, segment: 0 });
}

#[test]
fn messages_read_in_another_order_than_written() {
    let mut case = Case::new(Algorithm::Mesh, Collective::Broadcast, 3, 2);
    case.lane(1).swap(0, 1);
    let (expected, found) = (Span::input(1), Span::input(0));
    assert_eq!(case.refused(), Error::Message { at: place(1, 0, 0), expected, found, segment: 0 });
}

#[test]
fn a_message_that_nobody_reads() {
    let mut case = Case::new(Algorithm::Mesh, Collective::Broadcast, 3, 1);
    case.depth = 4;
    case.lane(1).truncate(2);
    assert_eq!(case.refused(), Error::Unread { operation: 0, writer: 0, channel: 0, reader: 1, messages: 1 });
    // Also where the writer cannot go on for it.
    case.lane(1).clear();
    case.depth = 2;
    assert_eq!(case.refused(), Error::Unread { operation: 0, writer: 0, channel: 0, reader: 1, messages: 2 });
}

#[test]
fn a_deadlock_that_more_cells_would_hide() {
    let mut case = Case::new(Algorithm::Mesh, Collective::AllGather, 3, 4);
    case.depth = 1;
    let Error::Deadlock { depth: 1, waiting } = case.refused() else { panic!() };
    assert_eq!(waiting, [place(0, 0, 1), place(1, 0, 1), place(2, 0, 1)]);
    // Everybody reads before it writes: no depth helps.
    case.depth = 100;
    for rank in 0..3 {
        case.lane(rank).rotate_left(1);
        for timed in case.lane(rank).iter_mut() {
            timed.lag = 0;
        }
    }
    assert!(matches!(case.refused(), Error::Deadlock { .. }));
}

#[test]
fn flows_of_different_lag_on_one_channel() {
    let mut case = Case::new(Algorithm::Mesh, Collective::Broadcast, 3, 2);
    case.lane(0)[2].lag = 1;
    assert!(matches!(case.refused(), Error::Malformed { at, .. } if at == place(0, 2, 0)));
}

#[test]
fn a_finish_that_is_missing_early_or_twice() {
    let mut case = reduce_scatter();
    *reduction(&mut case, 1).2 = false;
    assert_eq!(case.refused(), Error::NotFinished { element: element(1, 1, 0) });

    // A sum that goes on.
    let mut case = Case::new(Algorithm::HierRing, Collective::ReduceScatter, 3, 1);
    let sums = case.programs[2].lanes.iter_mut().flatten().filter_map(|timed| match &mut timed.step {
        Step::Reduce { finish, .. } => Some(finish),
        _ => None,
    });
    *sums.into_iter().find(|finish| !**finish).unwrap() = true;
    assert!(matches!(case.refused(), Error::WrongFinish { at: Position { rank: 2, .. } }));

    let mut case = reduce_scatter();
    let again = Step::Copy { source: Span::output(1), to: Span::output(1), finish: true };
    case.lane(1).push(Timed { lag: 1, step: again });
    assert_eq!(case.refused(), Error::WrongFinish { at: place(1, 3, 0) });
}

#[test]
fn ranks_that_reduce_in_different_orders() {
    let mut case = Case::new(Algorithm::Publish, Collective::AllReduce, 3, 1);
    let Step::Reduce { own, .. } = case.step(2, 1) else { panic!() };
    own.as_mut().unwrap().0 = 0;
    assert_eq!(case.refused(), Error::OrdersDiffer { element: element(2, 0, 0), other: 0 });
}

#[test]
fn an_order_that_is_not_the_trees() {
    let spoilt = |joins: &[usize]| {
        let mut case = Case::new(Algorithm::Mesh, Collective::ReduceScatter, 4, 1);
        for rank in 0..4 {
            let Step::Reduce { association, .. } = case.step(rank, 3) else { panic!() };
            *association = Association::Tree(if rank == 1 { joins.to_vec() } else { vec![0, 1, 0, 2] });
        }
        case.check()
    };
    assert_eq!(spoilt(&[0, 1, 0, 2]), Ok(()));
    assert_eq!(spoilt(&[0, 1, 1, 1]), Err(Error::NotCanonical { element: element(1, 1, 0) }));
    for joins in [&[0, 1, 0][..], &[0, 1, 0, 1], &[0, 2, 0, 2], &[0, 1, 0, 2, 0]] {
        assert_eq!(spoilt(joins), Err(Error::Association { at: place(1, 3, 0), inputs: 4 }));
    }
}

#[test]
fn blocks_of_different_sizes() {
    let mut case = Case::new(Algorithm::Mesh, Collective::AllGather, 2, 1);
    case.sizes = Sizes::Blocks(vec![2, 1]);
    assert_eq!(case.check(), Ok(()));
    let Step::Send { tee, .. } = case.step(0, 0) else { panic!() };
    *tee = Some(Span::output(1));
    assert_eq!(case.refused(), Error::Sizes { at: place(0, 0, 1) });
}

#[test]
fn a_barrier_that_leaks() {
    let mut case = Case::new(Algorithm::HierLog, Collective::Barrier, 4, 1);
    assert_eq!(case.lane(0).len(), 4);
    // One round only: ranks hear from their left neighbour and from nobody else.
    for rank in 0..4 {
        case.lane(rank).truncate(2);
    }
    assert_eq!(case.refused(), Error::BarrierLeaks { operation: 0, rank: 0, before: 1 });
}

#[test]
fn malformed_programs() {
    let spoil = |what: &dyn Fn(&mut Case)| {
        let mut case = reduce_scatter();
        what(&mut case);
        let error = case.refused();
        assert!(matches!(error, Error::Malformed { .. }), "{error}");
    };
    spoil(&|c| reduction(c, 0).0[0].reader = 1);
    spoil(&|c| reduction(c, 0).0[0].rank = 7);
    spoil(&|c| reduction(c, 0).0[0].channel = 9);
    spoil(&|c| reduction(c, 0).0[0].take = (0, 2));
    spoil(&|c| reduction(c, 0).0[0].take = (1, 1));
    spoil(&|c| reduction(c, 0).0[1].rank = 1);
    spoil(&|c| reduction(c, 0).1.as_mut().unwrap().0 = 3);
    spoil(&|c| reduction(c, 0).1.as_mut().unwrap().1 = Span::input(3));
    spoil(&|c| c.programs[0].channels[0].readers = vec![0]);
    spoil(&|c| c.programs[0].channels[0].readers = vec![2, 1]);
    spoil(&|c| c.sizes = Sizes::Blocks(vec![1]));
    spoil(&|c| c.depth = 0);
    spoil(&|c| {
        let Step::Reduce { to, .. } = c.step(0, 2) else { panic!() };
        *to = Some(Span::input(0));
    });
    spoil(&|c| {
        let Step::Send { channel, .. } = c.step(0, 0) else { panic!() };
        *channel = 5;
    });
    spoil(&|c| {
        let send = c.lane(0)[0].clone();
        c.programs[0].lanes.push(vec![send]);
    });
}

/// The place is in the text that a user sees.
#[test]
fn errors_say_where() {
    let mut case = reduce_scatter();
    *reduction(&mut case, 1).1 = Some((1, Span::input(2)));
    assert_eq!(
        case.refused().to_string(),
        "operation 0, rank 1, lane 0, step 2, segment 0: reduces parts of different blocks (1 and 2)"
    );
}
