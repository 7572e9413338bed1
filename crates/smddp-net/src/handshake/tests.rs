//! Tests of both ends without a socket.

use std::sync::Arc;

use super::*;
use crate::token::Token;

const FROM: Party = Party { id: [1; 16], rank: 3 };
const TO: Party = Party { id: [2; 16], rank: 5 };
const PURPOSES: [Purpose; 8] = [
    Purpose::Frames(1),
    Purpose::Query,
    Purpose::Watch,
    Purpose::Memory,
    Purpose::Export(9),
    Purpose::Bootstrap,
    Purpose::Status,
    Purpose::Probe,
];

fn token() -> Arc<Token> {
    Arc::new(Token::random().unwrap())
}

fn initiator(token: &Arc<Token>, purpose: Purpose) -> Initiator {
    Initiator::new(token, purpose, FROM, TO).unwrap()
}

/// Takes all output of an end.
fn take(end: &mut impl HandshakeEnd) -> Vec<u8> {
    let bytes = end.output().to_vec();
    end.sent(bytes.len());
    bytes
}

/// Returns a responder that has answered this greeting, and its reply.
fn answered(token: &Arc<Token>, listener: Listener, greeting: &[u8]) -> io::Result<(Responder, Vec<u8>)> {
    let mut responder = Responder::new(listener);
    responder.input(greeting)?;
    responder.answer(token.clone())?;
    let reply = take(&mut responder);
    Ok((responder, reply))
}

/// Runs a handshake up to the proof, and delivers the bytes in parts of at most `part` bytes.
fn shake_hands(
    initiator: &mut Initiator,
    token: &Arc<Token>,
    listener: Listener,
    part: usize,
) -> io::Result<Responder> {
    let mut responder = Responder::new(listener);
    for bytes in take(initiator).chunks(part) {
        assert!(responder.greeting().is_none());
        responder.input(bytes)?;
    }
    responder.answer(token.clone())?;
    for bytes in take(&mut responder).chunks(part) {
        assert!(initiator.keys().is_none() && initiator.output().is_empty());
        initiator.input(bytes)?;
    }
    for bytes in take(initiator).chunks(part) {
        assert!(!responder.is_authenticated() && responder.keys().is_none());
        responder.input(bytes)?;
    }
    Ok(responder)
}

#[test]
fn handshake_succeeds_for_each_purpose_and_for_bytes_that_arrive_one_at_a_time() {
    for (purpose, part) in
        PURPOSES.into_iter().flat_map(|purpose| [(purpose, 1), (purpose, 7), (purpose, 1000)])
    {
        let token = token();
        let mut initiator = initiator(&token, purpose);
        let responder = shake_hands(&mut initiator, &token, purpose.listener(), part).unwrap();
        assert!(responder.is_authenticated() && initiator.proof_sent());
        let greeting = Greeting { purpose, from: FROM, to: TO, token: token.id() };
        assert_eq!(responder.greeting(), Some(greeting));
        let [ours, theirs] = [initiator.keys(), responder.keys()].map(Option::unwrap);
        assert_eq!(ours.initiator.bytes(), theirs.initiator.bytes());
        assert_eq!(ours.responder.bytes(), theirs.responder.bytes());
        assert_ne!(ours.initiator.bytes(), ours.responder.bytes());
        assert_eq!((initiator.missing(), responder.missing()), (usize::from(purpose.has_verdict()), 0));
        assert_eq!(initiator.is_complete(), !purpose.has_verdict());
        if purpose.has_verdict() {
            initiator.input(&[ACCEPTED]).unwrap();
        }
        assert!(initiator.is_complete());
        // Later bytes belong to the connection.
        assert!(is_unauthenticated(&initiator.input(&[2]).unwrap_err()));
    }
}

#[test]
fn other_tokens_fail_the_handshake_at_both_ends() {
    let (ours, theirs) = (token(), token());
    assert_ne!(ours.id(), theirs.id());
    // Both the store's token and the job secret matter.
    let mixed = Arc::new(ours.with(b"a secret of the job's"));
    let another = Arc::new(ours.with(b"another"));
    for (ours, theirs) in [(&ours, &theirs), (&ours, &mixed), (&another, &mixed)] {
        let mut initiator = initiator(ours, Purpose::Bootstrap);
        let error = shake_hands(&mut initiator, theirs, Listener::Bootstrap, 1000).err().unwrap();
        assert!(is_unauthenticated(&error) && error.to_string().contains("this group's token"), "{error}");
        assert!(initiator.keys().is_none() && initiator.output().is_empty());
    }
    assert_eq!(format!("{ours:?}"), "Token(..)");
}

#[test]
fn replayed_and_reflected_messages_are_rejected() {
    let token = token();
    let mut first = initiator(&token, Purpose::Query);
    let greeting = take(&mut first);
    let (mut responder, reply) = answered(&token, Listener::Groups, &greeting).unwrap();
    first.input(&reply).unwrap();
    let proof = take(&mut first);
    responder.input(&proof).unwrap();
    // The same greeting again: the new nonce invalidates the earlier proof and the MACs of both replies.
    for recorded in [0, 1, 2] {
        let (mut again, other) = answered(&token, Listener::Groups, &greeting).unwrap();
        let macs = [&proof[..], &reply[REPLY_BYTES - 32..], &other[REPLY_BYTES - 32..]];
        assert!(is_unauthenticated(&again.input(macs[recorded]).unwrap_err()));
        assert!(!again.is_authenticated() && again.keys().is_none());
    }
    // An initiator rejects a reply to another greeting, and its own greeting.
    let mut next = initiator(&token, Purpose::Query);
    assert!(is_unauthenticated(&next.input(&reply).unwrap_err()));
    let mut next = initiator(&token, Purpose::Query);
    let own = take(&mut next);
    assert!(is_unauthenticated(&next.input(&own[..REPLY_BYTES]).unwrap_err()));
}

#[test]
fn changing_any_byte_of_greeting_reply_or_proof_fails_the_handshake() {
    let token = token();
    let fails = |at: usize, message: usize| {
        let mut initiator = initiator(&token, Purpose::Memory);
        let changed = |number: usize, mut bytes: Vec<u8>| {
            if number == message {
                bytes[at] ^= 1;
            }
            bytes
        };
        let greeting = changed(0, take(&mut initiator));
        let Ok((mut responder, reply)) = answered(&token, Listener::Process, &greeting) else { return true };
        let accepted = initiator.input(&changed(1, reply));
        accepted.and_then(|()| responder.input(&changed(2, take(&mut initiator)))).is_err()
    };
    for (message, bytes) in [GREETING_BYTES, REPLY_BYTES, PROOF_BYTES].into_iter().enumerate() {
        for at in 0..bytes {
            assert!(fails(at, message), "byte {at} of message {message}");
        }
    }
}

#[test]
fn truncated_messages_complete_nothing_and_longer_ones_are_errors() {
    let token = token();
    let greeting = take(&mut initiator(&token, Purpose::Watch));
    for length in 0..GREETING_BYTES {
        let mut responder = Responder::new(Listener::Groups);
        responder.input(&greeting[..length]).unwrap();
        assert!(responder.greeting().is_none() && responder.output().is_empty());
        assert_eq!(responder.missing(), GREETING_BYTES - length);
    }
    let longer = [&greeting[..], &[0]].concat();
    assert!(Responder::new(Listener::Groups).input(&longer).is_err());
    let (mut responder, reply) = answered(&token, Listener::Groups, &greeting).unwrap();
    responder.input(&[0; PROOF_BYTES - 1]).unwrap();
    assert!(!responder.is_authenticated() && responder.missing() == 1);
    assert!(responder.input(&[0; 2]).is_err());
    let mut initiator = initiator(&token, Purpose::Watch);
    assert!(initiator.input(&[&reply[..], &[0]].concat()).is_err());
}

#[test]
fn other_versions_and_programs_are_rejected_at_their_first_wrong_byte() {
    let token = token();
    let greeting = take(&mut initiator(&token, Purpose::Memory));
    let (_, reply) = answered(&token, Listener::Process, &greeting).unwrap();
    let check = |change: &dyn Fn(&mut Vec<u8>), expected: &str, length: usize| {
        for (message, is_reply) in [(&greeting, false), (&reply, true)] {
            let mut bytes = message.clone();
            change(&mut bytes);
            for end in [length - 1, length] {
                let outcome = match is_reply {
                    true => initiator(&token, Purpose::Memory).input(&bytes[..end]),
                    false => Responder::new(Listener::Process).input(&bytes[..end]),
                };
                assert_eq!(outcome.is_err(), end == length, "{expected}: {end} bytes");
                if let Err(error) = outcome {
                    assert!(is_unauthenticated(&error) && error.to_string() == expected, "{error}");
                }
            }
        }
    };
    let versions = format!(
        "the versions of smddp differ: handshake protocol {PROTOCOL} here, 10 there; install one version on all hosts"
    );
    let foreign = "the peer is not an smddp process: its first bytes are not those of the handshake";
    check(&|bytes| bytes[8] = 10, &versions, HEADER_BYTES);
    // Protocol version 10 used other last bytes of the magic.
    check(&|bytes| bytes[6..9].copy_from_slice(&[b'i', b'n', 10]), &versions, HEADER_BYTES);
    check(&|bytes| bytes[5] = b'_', foreign, 6);
    check(&|bytes| bytes[7] = b'G', foreign, HEADER_BYTES);
    check(&|bytes| bytes[0] = b'G', foreign, 1);
}

#[test]
fn greeting_for_the_purpose_of_another_listener_is_rejected() {
    let token = token();
    for (purpose, listener) in PURPOSES.into_iter().flat_map(|purpose| {
        [Listener::Groups, Listener::Process, Listener::Bootstrap].map(|to| (purpose, to))
    }) {
        let outcome = answered(&token, listener, &take(&mut initiator(&token, purpose)));
        assert_eq!(outcome.is_ok(), purpose.listener() == listener, "{purpose:?} at {listener:?}");
    }
    // Purposes that do not exist.
    for code in [6, 7, u8::MAX] {
        let mut greeting = take(&mut initiator(&token, Purpose::Memory));
        greeting[HEADER_BYTES] = code;
        assert!(is_unauthenticated(&Responder::new(Listener::Process).input(&greeting).unwrap_err()));
    }
}

#[test]
fn greetings_with_the_largest_numbers_are_decoded() {
    let [from, to] = [Party { id: [1; 16], rank: usize::MAX }, Party { id: [2; 16], rank: usize::MAX }];
    for purpose in [Purpose::Frames(usize::MAX), Purpose::Export(u64::MAX)] {
        let greeting = Greeting { purpose, from, to, token: [3; 16] };
        let bytes = greeting.encode().unwrap();
        assert_eq!((bytes.len(), Greeting::decode(&bytes)), (GREETING_BYTES, Some(greeting)));
        assert_eq!(Greeting::decode(&bytes[..GREETING_BYTES - 1]), None);
    }
}

#[test]
fn verdicts_other_than_acceptance_are_errors() {
    for verdict in 0..=u8::MAX {
        let token = token();
        let mut initiator = initiator(&token, Purpose::Watch);
        shake_hands(&mut initiator, &token, Listener::Groups, 1000).unwrap();
        let outcome = initiator.input(&[verdict]);
        assert_eq!(outcome.is_ok(), verdict == ACCEPTED);
        assert_eq!(outcome.is_err_and(|error| is_closed(&error)), verdict == CLOSED);
        assert_eq!(initiator.is_complete(), verdict == ACCEPTED);
    }
}
