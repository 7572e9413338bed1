//! Fuzzing of both ends of a handshake, connected by a network that fragments, changes, omits and adds bytes.

use std::sync::Arc;

use super::{GREETING_BYTES, Greeting, HandshakeEnd, Initiator, Listener, Party, Purpose, Responder};
use crate::fuzzing::Script;
use crate::fuzzing::known_token;
use crate::token::Token;

/// One direction of the network.
#[derive(Default)]
struct Direction {
    waiting: Vec<u8>,
    /// A byte was changed, omitted or added.
    tampered: bool,
}

impl Direction {
    /// Takes an arbitrary part of an end's output.
    fn send(&mut self, end: &mut impl HandshakeEnd, script: &mut Script<'_>) {
        let bytes = part(end.output(), script);
        self.waiting.extend_from_slice(bytes);
        let sent = bytes.len();
        end.sent(sent);
    }

    fn tamper(&mut self, script: &mut Script<'_>) {
        let at = script.below(self.waiting.len());
        match (script.below(3), self.waiting.get_mut(at)) {
            (0, Some(byte)) => *byte ^= script.byte().max(1),
            (1, Some(_)) => drop(self.waiting.remove(at)),
            _ => {
                let more = usize::from(script.byte());
                self.waiting.extend_from_slice(script.take(more));
            }
        }
        self.tampered = true;
    }

    /// Delivers an arbitrary part of the bytes. Returns false if the end rejects them.
    fn deliver(&mut self, end: &mut impl HandshakeEnd, script: &mut Script<'_>) -> bool {
        let bytes = part(&self.waiting, script).to_vec();
        let fits = bytes.len() <= end.missing();
        let accepted = end.input(&bytes).is_ok();
        assert!(fits || !accepted, "an end took bytes beyond its handshake");
        self.waiting.drain(..bytes.len());
        accepted
    }
}

/// Returns all bytes, or the first of them.
fn part<'a>(bytes: &'a [u8], script: &mut Script<'_>) -> &'a [u8] {
    let all = script.yes();
    &bytes[..if all { bytes.len() } else { script.below(bytes.len() + 1) }]
}

fn purpose(script: &mut Script<'_>) -> Purpose {
    match script.below(8) {
        0 => Purpose::Frames(script.number() as usize),
        1 => Purpose::Query,
        2 => Purpose::Watch,
        3 => Purpose::Memory,
        4 => Purpose::Export(script.number()),
        5 => Purpose::Status,
        6 => Purpose::Probe,
        _ => Purpose::Bootstrap,
    }
}

fn party(script: &mut Script<'_>) -> Party {
    Party { id: [script.byte(); 16], rank: script.number() as u32 as usize }
}

/// Runs a handshake, or decodes the script as a greeting.
pub fn both_ends(script: &mut Script<'_>) {
    if script.yes() {
        return decode(script.take(GREETING_BYTES));
    }
    let ours = known_token();
    let theirs = if script.below(4) == 0 { Arc::new(ours.with(b"another secret")) } else { ours.clone() };
    let listener = [Listener::Groups, Listener::Process, Listener::Bootstrap][script.below(3)];
    let (purpose, from, to) = (purpose(script), party(script), party(script));
    let mut initiator = Initiator::new(&ours, purpose, from, to).expect("random bytes");
    let mut responder = Responder::new(listener);
    let [mut forward, mut back] = [Direction::default(), Direction::default()];
    let mut open = true;
    for _ in 0..40 {
        match script.step() {
            _ if !open => break,
            None => break,
            Some(0..16) => forward.tamper(script),
            Some(16..32) => back.tamper(script),
            Some(step) if step % 2 == 0 => {
                forward.send(&mut initiator, script);
                open = forward.deliver(&mut responder, script);
            }
            Some(_) => {
                answer(&mut responder, &theirs);
                back.send(&mut responder, script);
                if responder.is_authenticated() && purpose.has_verdict() && back.waiting.is_empty() {
                    back.waiting.push(super::ACCEPTED);
                }
                open = back.deliver(&mut initiator, script);
            }
        }
    }
    let [initiator_keys, responder_keys] =
        [initiator.keys(), responder.keys()].map(|keys| keys.map(|keys| [keys.initiator, keys.responder]));
    if let Some(keys) = responder_keys {
        let expected = Greeting { purpose, from, to, token: ours.id() };
        assert_eq!(responder.greeting(), Some(expected), "the responder took another greeting");
        assert!(expected.purpose.listener() == listener && same(&ours, &theirs));
        let both = initiator_keys.as_ref().expect("the initiator sent a proof before it had one");
        for (mine, other) in keys.iter().zip(both) {
            assert_eq!(mine.bytes(), other.bytes());
        }
    }
    assert!(initiator_keys.is_none() || same(&ours, &theirs), "the initiator trusts another token");
}

fn same(one: &Token, other: &Token) -> bool {
    one.id() == other.id()
}

fn answer(responder: &mut Responder, token: &Arc<Token>) {
    if responder.missing() == 0 && !responder.is_authenticated() && responder.greeting().is_some() {
        let _ = responder.answer(token.clone());
    }
}

/// Decodes a greeting.
fn decode(bytes: &[u8]) {
    if let Some(greeting) = Greeting::decode(bytes) {
        let again = greeting.encode().expect("random bytes");
        assert_eq!(Greeting::decode(&again), Some(greeting));
    }
    let rejected = super::check_header(bytes).is_err();
    assert!(rejected || (0..bytes.len()).all(|length| super::check_header(&bytes[..length]).is_ok()));
}
