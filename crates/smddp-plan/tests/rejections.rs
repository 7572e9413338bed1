//! Incorrect plans with one defect each: the checker rejects them with the expected reason and position.

use smddp_plan::check::{Element, Error, Operation, Position, Sizes, check, programs};
use smddp_plan::{
    Algorithm, Association, Buffer, Channel, Collective, Program, Source, Span, Step, Timed, Topology,
};

/// A correct plan that a test modifies.
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

    fn rejection(&self) -> Error {
        self.check().expect_err("the plan is wrong")
    }

    fn pipeline(&mut self, rank: usize) -> &mut Vec<Timed> {
        &mut self.programs[rank].pipelines[0]
    }

    fn step(&mut self, rank: usize, step: usize) -> &mut Step {
        &mut self.pipeline(rank)[step].step
    }
}

fn position(rank: usize, step: usize, segment: usize) -> Position {
    Position { rank, step, segment, ..Position::default() }
}

fn element(rank: usize, block: usize, segment: usize) -> Element {
    Element { operation: 0, rank, block, segment }
}

/// Steps of a mesh reduce_scatter of 3 ranks: two Sends, one Reduce.
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
fn missing_contributor_is_rejected() {
    let mut case = reduce_scatter();
    let (from, own, finish) = reduction(&mut case, 1);
    *own = None;
    *finish = false;
    assert_eq!(from.len(), 2);
    assert_eq!(case.rejection(), Error::MissingContributor { element: element(1, 1, 0), contributor: 1 });
}

/// A reduce of two ranks in which the leaf adds to the root's message, and the root adds its own input again.
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
        programs: vec![Program::single_pipeline(to(1), root), Program::single_pipeline(to(0), leaf)],
        sizes: Sizes::Blocks(vec![1, 0]),
        in_place: false,
        depth: 2,
    }
}

#[test]
fn double_contributor_is_rejected() {
    assert_eq!(echo(false).rejection(), Error::DoubleContributor { at: position(0, 1, 0), contributor: 0 });
}

#[test]
fn finished_result_in_a_reduction_is_rejected() {
    assert_eq!(echo(true).rejection(), Error::WrongFinish { at: position(0, 1, 0) });
}

#[test]
fn mixed_blocks_are_rejected() {
    let mut case = reduce_scatter();
    *reduction(&mut case, 1).1 = Some((1, Span::input(2)));
    assert_eq!(case.rejection(), Error::MixedBlocks { at: position(1, 2, 0), first: 1, second: 2 });
}

#[test]
fn swapped_output_blocks_are_rejected() {
    let mut case = Case::new(Algorithm::Mesh, Collective::AllGather, 3, 1);
    // Rank 0 receives from 1, then 2.
    for (step, block) in [(1, 2), (2, 1)] {
        let Step::Receive { to, .. } = case.step(0, step) else { panic!() };
        *to = Span::output(block);
    }
    assert_eq!(case.rejection(), Error::WrongBlock { element: element(0, 1, 0), expected: 1, found: 2 });
}

#[test]
fn unwritten_block_is_rejected() {
    let mut case = Case::new(Algorithm::Mesh, Collective::AllGather, 3, 2);
    let Step::Send { tee, .. } = case.step(2, 0) else { panic!() };
    *tee = None;
    assert_eq!(case.rejection(), Error::NotWritten { element: element(2, 2, 0) });
}

#[test]
fn block_of_another_pair_is_rejected() {
    let mut case = Case::new(Algorithm::Mesh, Collective::AllToAll, 3, 1);
    // Rank 0 sends the block of rank 2 to rank 1, which takes it as its own.
    let Step::Send { source, .. } = case.step(0, 0) else { panic!() };
    *source = Span::input(2);
    let Some(Step::Receive { from, .. }) = case.pipeline(1).iter_mut().map(|t| &mut t.step).last() else {
        panic!()
    };
    assert_eq!(from.rank, 0);
    from.message = Span::input(2);
    assert_eq!(case.rejection(), Error::WrongBlock { element: element(1, 0, 0), expected: 1, found: 2 });
}

#[test]
fn read_before_write_is_rejected() {
    let mut case = Case::new(Algorithm::Mesh, Collective::AllGather, 3, 2);
    case.programs[1].scratch_blocks = 1;
    let Step::Send { source, .. } = case.step(1, 0) else { panic!() };
    *source = Span::scratch(0);
    let Error::ReadBeforeWrite { at: found, buffer: Buffer::Scratch, .. } = case.rejection() else {
        panic!()
    };
    assert_eq!(found, position(1, 0, 0));
}

/// A scatter whose root copies its own block via Scratch, from one pipeline to another. A token of the other
/// rank, sent after the first copy, orders the two copies.
fn two_pipelines(ordered: bool) -> Case {
    let pipeline = |steps: Vec<Step>| steps.into_iter().map(|step| Timed { lag: 0, step }).collect();
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
    let root =
        Program { channels: to(1), pipelines: vec![pipeline(first), pipeline(second)], scratch_blocks: 1 };
    Case {
        collective: Collective::Scatter,
        programs: vec![root, Program::single_pipeline(to(0), pipeline(theirs))],
        sizes: Sizes::Blocks(vec![1; 2]),
        in_place: false,
        depth: 2,
    }
}

#[test]
fn unordered_pipelines_are_rejected() {
    assert_eq!(two_pipelines(true).check(), Ok(()));
    let at = Position { pipeline: 1, ..position(0, 0, 0) };
    assert_eq!(
        two_pipelines(false).rejection(),
        Error::Unordered { at, buffer: Buffer::Scratch, block: 0, other: 0 }
    );
    // Pipeline 0 overwrites Scratch, and nothing orders it after the read of pipeline 1. The schedule decides
    // which access is second, but they are always unordered.
    let mut case = two_pipelines(true);
    let copy = Step::Copy { source: Span::input(0), to: Span::scratch(0), finish: false };
    case.programs[0].pipelines[0].push(Timed { lag: 0, step: copy });
    let Error::Unordered { buffer: Buffer::Scratch, block: 0, .. } = case.rejection() else { panic!() };
}

#[test]
fn input_overwritten_before_its_send_is_rejected() {
    // Each rank overwrites the block for its right neighbour before it sends the block.
    let mut case = Case::new(Algorithm::Mesh, Collective::AllReduce, 3, 2);
    for rank in 0..3 {
        let to = Span::output((rank + 1) % 3);
        let copy = Step::Copy { source: Span::input(rank), to, finish: false };
        case.pipeline(rank).insert(0, Timed { lag: 0, step: copy });
    }
    assert_eq!(case.check(), Ok(()), "correct out of place");
    case.in_place = true;
    assert_eq!(case.rejection(), Error::Clobbered { at: position(0, 1, 0), block: 1 });
}

#[test]
fn message_that_differs_from_the_expectation_is_rejected() {
    let mut case = Case::new(Algorithm::Mesh, Collective::Scatter, 3, 2);
    let Step::Receive { from, .. } = case.step(2, 0) else { panic!() };
    from.message = Span::input(1);
    let (expected, found) = (Span::input(1), Span::input(2));
    assert_eq!(case.rejection(), Error::Message { at: position(2, 0, 0), expected, found, segment: 0 });
}

#[test]
fn messages_read_in_another_order_are_rejected() {
    let mut case = Case::new(Algorithm::Mesh, Collective::Broadcast, 3, 2);
    case.pipeline(1).swap(0, 1);
    let (expected, found) = (Span::input(1), Span::input(0));
    assert_eq!(case.rejection(), Error::Message { at: position(1, 0, 0), expected, found, segment: 0 });
}

#[test]
fn unread_message_is_rejected() {
    let mut case = Case::new(Algorithm::Mesh, Collective::Broadcast, 3, 1);
    case.depth = 4;
    case.pipeline(1).truncate(2);
    assert_eq!(
        case.rejection(),
        Error::Unread { operation: 0, writer: 0, channel: 0, reader: 1, messages: 1 }
    );
    // The writer may also be blocked by the unread message.
    case.pipeline(1).clear();
    case.depth = 2;
    assert_eq!(
        case.rejection(),
        Error::Unread { operation: 0, writer: 0, channel: 0, reader: 1, messages: 2 }
    );
}

#[test]
fn deadlock_is_rejected_at_the_given_depth() {
    let mut case = Case::new(Algorithm::Mesh, Collective::AllGather, 3, 4);
    case.depth = 1;
    let Error::Deadlock { depth: 1, waiting } = case.rejection() else { panic!() };
    assert_eq!(waiting, [position(0, 0, 1), position(1, 0, 1), position(2, 0, 1)]);
    // All ranks read before they write, so no depth is sufficient.
    case.depth = 100;
    for rank in 0..3 {
        case.pipeline(rank).rotate_left(1);
        for timed in case.pipeline(rank).iter_mut() {
            timed.lag = 0;
        }
    }
    assert!(matches!(case.rejection(), Error::Deadlock { .. }));
}

#[test]
fn different_lags_on_one_channel_are_rejected() {
    let mut case = Case::new(Algorithm::Mesh, Collective::Broadcast, 3, 2);
    case.pipeline(0)[2].lag = 1;
    assert!(matches!(case.rejection(), Error::Malformed { at, .. } if at == position(0, 2, 0)));
}

#[test]
fn missing_early_and_repeated_finish_are_rejected() {
    let mut case = reduce_scatter();
    *reduction(&mut case, 1).2 = false;
    assert_eq!(case.rejection(), Error::NotFinished { element: element(1, 1, 0) });

    // A partial sum that is sent on.
    let mut case = Case::new(Algorithm::HierRing, Collective::ReduceScatter, 3, 1);
    let sums = case.programs[2].pipelines.iter_mut().flatten().filter_map(|timed| match &mut timed.step {
        Step::Reduce { finish, .. } => Some(finish),
        _ => None,
    });
    *sums.into_iter().find(|finish| !**finish).unwrap() = true;
    assert!(matches!(case.rejection(), Error::WrongFinish { at: Position { rank: 2, .. } }));

    let mut case = reduce_scatter();
    let again = Step::Copy { source: Span::output(1), to: Span::output(1), finish: true };
    case.pipeline(1).push(Timed { lag: 1, step: again });
    assert_eq!(case.rejection(), Error::WrongFinish { at: position(1, 3, 0) });
}

#[test]
fn ranks_with_different_reduction_orders_are_rejected() {
    let mut case = Case::new(Algorithm::Publish, Collective::AllReduce, 3, 1);
    let Step::Reduce { own, .. } = case.step(2, 1) else { panic!() };
    own.as_mut().unwrap().0 = 0;
    assert_eq!(case.rejection(), Error::OrdersDiffer { element: element(2, 0, 0), other: 0 });
}

#[test]
fn order_that_differs_from_the_canonical_tree_is_rejected() {
    let check_with = |joins: &[usize]| {
        let mut case = Case::new(Algorithm::Mesh, Collective::ReduceScatter, 4, 1);
        for rank in 0..4 {
            let Step::Reduce { association, .. } = case.step(rank, 3) else { panic!() };
            *association = Association::Tree(if rank == 1 { joins.to_vec() } else { vec![0, 1, 0, 2] });
        }
        case.check()
    };
    assert_eq!(check_with(&[0, 1, 0, 2]), Ok(()));
    assert_eq!(check_with(&[0, 1, 1, 1]), Err(Error::NotCanonical { element: element(1, 1, 0) }));
    for joins in [&[0, 1, 0][..], &[0, 1, 0, 1], &[0, 2, 0, 2], &[0, 1, 0, 2, 0]] {
        assert_eq!(check_with(joins), Err(Error::Association { at: position(1, 3, 0), inputs: 4 }));
    }
}

#[test]
fn blocks_of_different_sizes_are_rejected() {
    let mut case = Case::new(Algorithm::Mesh, Collective::AllGather, 2, 1);
    case.sizes = Sizes::Blocks(vec![2, 1]);
    assert_eq!(case.check(), Ok(()));
    let Step::Send { tee, .. } = case.step(0, 0) else { panic!() };
    *tee = Some(Span::output(1));
    assert_eq!(case.rejection(), Error::Sizes { at: position(0, 0, 1) });
}

#[test]
fn leaking_barrier_is_rejected() {
    let mut case = Case::new(Algorithm::HierLog, Collective::Barrier, 4, 1);
    assert_eq!(case.pipeline(0).len(), 4);
    // One round only: ranks receive only from their left neighbour.
    for rank in 0..4 {
        case.pipeline(rank).truncate(2);
    }
    assert_eq!(case.rejection(), Error::BarrierLeaks { operation: 0, rank: 0, before: 1 });
}

#[test]
fn malformed_programs_are_rejected() {
    let assert_malformed = |change: &dyn Fn(&mut Case)| {
        let mut case = reduce_scatter();
        change(&mut case);
        let error = case.rejection();
        assert!(matches!(error, Error::Malformed { .. }), "{error}");
    };
    assert_malformed(&|c| reduction(c, 0).0[0].reader = 1);
    assert_malformed(&|c| reduction(c, 0).0[0].rank = 7);
    assert_malformed(&|c| reduction(c, 0).0[0].channel = 9);
    assert_malformed(&|c| reduction(c, 0).0[0].take = (0, 2));
    assert_malformed(&|c| reduction(c, 0).0[0].take = (1, 1));
    assert_malformed(&|c| reduction(c, 0).0[1].rank = 1);
    assert_malformed(&|c| reduction(c, 0).1.as_mut().unwrap().0 = 3);
    assert_malformed(&|c| reduction(c, 0).1.as_mut().unwrap().1 = Span::input(3));
    assert_malformed(&|c| c.programs[0].channels[0].readers = vec![0]);
    assert_malformed(&|c| c.programs[0].channels[0].readers = vec![2, 1]);
    assert_malformed(&|c| c.sizes = Sizes::Blocks(vec![1]));
    assert_malformed(&|c| c.depth = 0);
    assert_malformed(&|c| {
        let Step::Reduce { to, .. } = c.step(0, 2) else { panic!() };
        *to = Some(Span::input(0));
    });
    assert_malformed(&|c| {
        let Step::Send { channel, .. } = c.step(0, 0) else { panic!() };
        *channel = 5;
    });
    assert_malformed(&|c| {
        let send = c.pipeline(0)[0].clone();
        c.programs[0].pipelines.push(vec![send]);
    });
}

/// An error text has the position.
#[test]
fn errors_report_the_position() {
    let mut case = reduce_scatter();
    *reduction(&mut case, 1).1 = Some((1, Span::input(2)));
    assert_eq!(
        case.rejection().to_string(),
        "operation 0, rank 1, pipeline 0, step 2, segment 0: reduces parts of different blocks (1 and 2)"
    );
}
