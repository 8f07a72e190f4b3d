//! Who may join: a job has a secret, and every connection proves on both sides that it knows it.
//!
//! ```text
//! dialer                                   listener
//!   hello      version, role, from, to, nonce  ->     52 bytes
//!          <-  challenge   version, nonce             44 bytes
//!   proof      keyed hash of both                ->   32 bytes
//!          <-  verdict     status, keyed hash         36 bytes
//! ```
//!
//! All four have a fixed size, so nothing a stranger says is read beyond it. The secret itself never travels. A proof
//! covers every byte of hello and challenge and the side it comes from: it cannot be replayed, nor sent back to its
//! maker. Both sides say how they protect their frames, and have to agree; the keys for that come out of the same handshake
//! ([`crate::protect`]).

use std::fmt;

use crossmesh_core::id::Rank;

use crate::deadline::{Deadline, Stream, StreamError, read_exact_by, write_all_by};
use crate::environment::{JobName, Place, Variables, job_name};
use crate::protect::{Protect, Session, Side};

/// The version of everything that travels between ranks. Both sides must have the same.
pub const WIRE_VERSION: u16 = 3;

const MAGIC: [u8; 8] = *b"XMESHJOB";
const HELLO_BYTES: usize = 52;
const CHALLENGE_BYTES: usize = 44;
const PROOF_BYTES: usize = 32;
const VERDICT_BYTES: usize = 36;
/// Where hello and challenge say how frames are protected.
const PROTECT_AT: usize = 11;
/// A guess at fewer bytes than this is too easy.
const SHORTEST_SECRET: usize = 16;

/// The variable that holds the secret. It never stands in a command line, which everybody on a host may read.
pub const SECRET_VARIABLE: &str = "CROSSMESH_SECRET";
/// The variable that names a file with it.
pub const SECRET_FILE_VARIABLE: &str = "CROSSMESH_SECRET_FILE";

/// What a job's processes know and others do not, and how they protect their connections by it. It is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret {
    key: [u8; 32],
    protect: Protect,
    /// Of a job that failed before and meets again.
    is_another_attempt: bool,
}

impl Secret {
    /// A new one, from the system's randomness.
    pub fn generate() -> Result<Self, AuthError> {
        Ok(Self::of_key(random_bytes()?))
    }

    fn of_key(key: [u8; 32]) -> Self {
        Self { key, protect: Protect::None, is_another_attempt: false }
    }

    /// The same secret, for connections that are protected by it.
    pub fn protecting(self, protect: Protect) -> Self {
        Self { protect, ..self }
    }

    /// From what a person, a file or the environment gave: at least 16 bytes; blanks around it do not count.
    pub fn from_text(text: &str) -> Result<Self, AuthError> {
        let text = text.trim();
        if text.len() < SHORTEST_SECRET {
            return Err(AuthError::ShortSecret { len: text.len(), least: SHORTEST_SECRET });
        }
        Ok(match decode_hex(text) {
            Some(key) => Self::of_key(key),
            None => Self::of_key(blake3::derive_key("crossmesh 1 job secret from text", text.as_bytes())),
        })
    }

    /// The secret that the environment holds, or the file it names, if any.
    pub fn from_variables(variables: &Variables) -> Result<Option<Self>, AuthError> {
        if let Some(text) = variables.get(SECRET_VARIABLE) {
            return Self::from_text(text).map(Some);
        }
        let Some(path) = variables.get(SECRET_FILE_VARIABLE) else { return Ok(None) };
        match std::fs::read_to_string(path) {
            Ok(text) => Self::from_text(&text).map(Some),
            Err(cause) => Err(AuthError::SecretFile { path: path.clone(), cause }),
        }
    }

    /// The secret of a rank's job, and what to say about it, if anything. It is one that was given, or one that the
    /// launcher drew by lot. Ranks that meet on this host alone may make do with the job's name, which keeps jobs apart;
    /// beyond it a name that others can guess is no secret, and none is an error.
    pub fn of_job(place: &Place, variables: &Variables) -> Result<(Self, Option<String>), AuthError> {
        if let Some(secret) = Self::from_variables(variables)? {
            return Ok((secret, None));
        }
        let (launcher, name) = (place.launcher, job_name(place.launcher, variables));
        let of = |name: &JobName| {
            let context = "crossmesh 1 job secret from the launcher's name";
            Self::of_key(blake3::derive_key(context, name.text.as_bytes()))
        };
        match name {
            Some(name) if name.secret => Ok((of(&name), None)),
            Some(name) if place.is_on_loopback() => {
                let variables = name.variables.join(" and ");
                let note = format!(
                    "note: no {SECRET_VARIABLE} was given; ranks know each other by {variables}, which others on this host may guess"
                );
                Ok((of(&name), Some(note)))
            }
            _ => Err(AuthError::NoSecret { launcher, addr: place.master_addr.clone() }),
        }
    }

    /// The secret of another attempt of the same job: whoever still holds on to an earlier one is a stranger.
    pub fn again(&self, attempt: u32) -> Self {
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        hasher.update(b"crossmesh 1 attempt").update(&attempt.to_le_bytes());
        Self { key: *hasher.finalize().as_bytes(), protect: self.protect, is_another_attempt: true }
    }

    /// Whether whoever holds another secret may still be about to leave an earlier attempt.
    pub fn is_another_attempt(&self) -> bool {
        self.is_another_attempt
    }

    /// The form that is handed to the processes of a job, in their environment.
    pub fn to_hex(&self) -> String {
        self.key.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    fn prove(&self, side: &str, transcript: &[u8]) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        hasher.update(side.as_bytes()).update(&[0]).update(transcript);
        hasher.finalize()
    }

    /// What a connection's two ends know once both have proven themselves.
    fn session(&self, transcript: &[u8], side: Side) -> Session {
        Session::new(self.protect, *self.prove("session", transcript).as_bytes(), side)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

fn decode_hex(text: &str) -> Option<[u8; 32]> {
    let digits: Vec<u8> = text.chars().map(|c| c.to_digit(16).map(|d| d as u8)).collect::<Option<_>>()?;
    let bytes: Vec<u8> = digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect();
    if digits.len() == 64 { bytes.try_into().ok() } else { None }
}

fn random_bytes() -> Result<[u8; 32], AuthError> {
    let mut bytes = [0; 32];
    let filled = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    match filled {
        Ok(32) => Ok(bytes),
        _ => Err(AuthError::NoRandomness),
    }
}

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// To the rendezvous, and for control afterwards.
    Rendezvous,
    /// Between two ranks, for tensors.
    Data,
    /// From a rank to the one it hangs under, for control.
    Tree,
    /// A question: are you there, where is somebody, what went wrong?
    Ask,
}

impl Role {
    fn code(self) -> u8 {
        match self {
            Role::Rendezvous => 1,
            Role::Data => 2,
            Role::Tree => 3,
            Role::Ask => 4,
        }
    }

    fn of_code(code: u8) -> Option<Self> {
        [Role::Rendezvous, Role::Data, Role::Tree, Role::Ask].into_iter().find(|role| role.code() == code)
    }
}

/// Who a connection says it is from, whom it wants, and what for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Claim {
    pub role: Role,
    pub from: Rank,
    pub to: Rank,
}

/// Why a listener turns away somebody who may know the secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("wrong secret")]
    WrongSecret,
    #[error("this rank is here already")]
    DuplicateRank,
    #[error("this job has no such rank")]
    UnknownRank,
    #[error("another rank or role listens here")]
    WrongDoor,
    #[error(
        "the other side has --protect {theirs}, this one {ours}\nhint: give all ranks the same --protect or CROSSMESH_PROTECT"
    )]
    Protection { theirs: Protect, ours: Protect },
}

impl Refusal {
    /// 0 is no refusal.
    fn code(self) -> u8 {
        match self {
            Refusal::WrongSecret => 1,
            Refusal::DuplicateRank => 2,
            Refusal::UnknownRank => 3,
            Refusal::WrongDoor => 4,
            Refusal::Protection { .. } => 5,
        }
    }

    /// As the other side means it, which protects its frames like this, and we like that.
    fn of_code(code: u8, theirs: Protect, ours: Protect) -> Option<Self> {
        let all = [Refusal::WrongSecret, Refusal::DuplicateRank, Refusal::UnknownRank, Refusal::WrongDoor];
        all.into_iter().chain([Refusal::Protection { theirs, ours }]).find(|r| r.code() == code)
    }
}

/// Why a connection was not accepted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AuthError {
    #[error("a secret of {len} B is too short\nhint: give at least {least}, or none: one is generated")]
    ShortSecret { len: usize, least: usize },
    #[error("cannot read the secret of {SECRET_FILE_VARIABLE}={path}: {cause}")]
    SecretFile { path: String, cause: std::io::Error },
    #[error(
        "the job that {launcher} started has no secret, and its ranks meet at {addr}, where strangers could join\nhint: set {SECRET_VARIABLE} to the same random text for all ranks (openssl rand -hex 32), or {SECRET_FILE_VARIABLE} to a file with it that only you can read; `crossmesh launch` generates one"
    )]
    NoSecret { launcher: &'static str, addr: String },
    #[error("the system has no randomness for a secret")]
    NoRandomness,
    #[error("not a crossmesh process (it says {0})")]
    Stranger(String),
    #[error("it speaks version {theirs}, this is version {ours}\nhint: run the same crossmesh everywhere")]
    WrongVersion { theirs: u16, ours: u16 },
    #[error("{}turned away: {why}", Claimed(*.claim))]
    Refused { claim: Option<Claim>, why: Refusal },
    #[error(transparent)]
    Stream(#[from] StreamError),
}

/// `r3: `, where a rank was claimed.
struct Claimed(Option<Claim>);

impl fmt::Display for Claimed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |claim| write!(f, "{}: ", claim.from))
    }
}

/// The dialer's side of a handshake, without the connection: it says what to write, and is told what was read.
#[derive(Debug)]
pub struct Dialing {
    secret: Secret,
    hello: [u8; HELLO_BYTES],
    /// Hello and challenge, once that came.
    transcript: Vec<u8>,
}

impl Dialing {
    /// Begins; the greeting goes to `out`.
    pub fn start(secret: &Secret, claim: Claim, out: &mut Vec<u8>) -> Result<Self, AuthError> {
        let mut hello = hello(claim, random_bytes()?);
        hello[PROTECT_AT] = secret.protect.code();
        out.extend_from_slice(&hello);
        Ok(Self { secret: secret.clone(), hello, transcript: vec![] })
    }

    /// How many bytes to read next.
    pub fn needs(&self) -> usize {
        if self.transcript.is_empty() { CHALLENGE_BYTES } else { VERDICT_BYTES }
    }

    /// Takes as many bytes as it [needs](Self::needs); once both sides have proven themselves, what they share.
    pub fn take(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<Option<Session>, AuthError> {
        if self.transcript.is_empty() {
            check_greeting(bytes)?;
            parse_protect(bytes[PROTECT_AT])?;
            self.transcript = [&self.hello[..], bytes].concat();
            out.extend_from_slice(self.secret.prove("dialer", &self.transcript).as_bytes());
            return Ok(None);
        }
        let mut verdict = [0; VERDICT_BYTES];
        verdict.copy_from_slice(bytes);
        let theirs = parse_protect(self.transcript[HELLO_BYTES + PROTECT_AT])?;
        read_verdict(&self.secret, &self.transcript, &verdict, theirs)?;
        Ok(Some(self.secret.session(&self.transcript, Side::Dialer)))
    }
}

/// The listener's side, likewise.
#[derive(Debug)]
pub struct Answering {
    secret: Secret,
    said: Vec<u8>,
    claim: Option<Claim>,
}

impl Answering {
    pub fn new(secret: &Secret) -> Self {
        Self { secret: secret.clone(), said: vec![], claim: None }
    }

    /// How many bytes to read next. A stranger may say less than a hello, and wait; eight bytes tell.
    pub fn needs(&self) -> usize {
        match self.said.len() {
            0 => MAGIC.len(),
            heard if heard < HELLO_BYTES => HELLO_BYTES - heard,
            _ => PROOF_BYTES,
        }
    }

    /// Takes as many bytes as it [needs](Self::needs). What is in `out` is to be written even where this fails.
    pub fn take(
        &mut self,
        bytes: &[u8],
        out: &mut Vec<u8>,
        admit: impl FnOnce(Claim) -> Result<(), Refusal>,
    ) -> Result<Option<(Claim, Session)>, AuthError> {
        let Some(claim) = self.claim else {
            self.said.extend_from_slice(bytes);
            self.claim = self.hear_hello(out)?;
            return Ok(None);
        };
        let mut proof = [0; PROOF_BYTES];
        proof.copy_from_slice(bytes);
        // blake3's hashes compare in constant time.
        let known = self.secret.prove("dialer", &self.said) == blake3::Hash::from_bytes(proof);
        let (theirs, ours) = (parse_protect(self.said[PROTECT_AT])?, self.secret.protect);
        let decided = match known {
            false => Err(Refusal::WrongSecret),
            true if theirs != ours => Err(Refusal::Protection { theirs, ours }),
            true => admit(claim),
        };
        out.extend_from_slice(&verdict(&self.secret, &self.said, decided));
        match decided {
            Ok(()) => Ok(Some((claim, self.secret.session(&self.said, Side::Listener)))),
            Err(why) => Err(AuthError::Refused { claim: Some(claim), why }),
        }
    }

    fn hear_hello(&mut self, out: &mut Vec<u8>) -> Result<Option<Claim>, AuthError> {
        check_magic(&self.said[..MAGIC.len()])?;
        let Ok(hello) = <[u8; HELLO_BYTES]>::try_from(self.said.as_slice()) else { return Ok(None) };
        // Somebody of another version is told ours, so that they can say what is wrong.
        let mut challenge = challenge(random_bytes()?);
        challenge[PROTECT_AT] = self.secret.protect.code();
        out.extend_from_slice(&challenge);
        let claim = parse_hello(&hello)?;
        parse_protect(hello[PROTECT_AT])?;
        self.said.extend_from_slice(&challenge);
        Ok(Some(claim))
    }
}

/// The dialer's side, on a stream that blocks: proves itself, and that the listener knows the secret too.
pub fn dial(
    stream: &mut impl Stream,
    secret: &Secret,
    claim: Claim,
    deadline: Deadline,
) -> Result<Session, AuthError> {
    let mut out = vec![];
    let mut dialing = Dialing::start(secret, claim, &mut out)?;
    loop {
        write_all_by(stream, &std::mem::take(&mut out), deadline)?;
        let mut bytes = vec![0; dialing.needs()];
        read_exact_by(stream, &mut bytes, deadline)?;
        if let Some(session) = dialing.take(&bytes, &mut out)? {
            return Ok(session);
        }
    }
}

/// The listener's side, on a stream that blocks. `admit` decides about somebody who has proven to know the secret.
pub fn answer(
    stream: &mut impl Stream,
    secret: &Secret,
    deadline: Deadline,
    admit: impl Fn(Claim) -> Result<(), Refusal>,
) -> Result<(Claim, Session), AuthError> {
    let mut answering = Answering::new(secret);
    loop {
        let mut bytes = vec![0; answering.needs()];
        read_exact_by(stream, &mut bytes, deadline)?;
        let mut out = vec![];
        let taken = answering.take(&bytes, &mut out, &admit);
        write_all_by(stream, &out, deadline)?;
        if let Some(known) = taken? {
            return Ok(known);
        }
    }
}

fn parse_protect(code: u8) -> Result<Protect, AuthError> {
    Protect::of_code(code).ok_or_else(|| AuthError::Stranger(format!("protection {code}")))
}

fn hello(claim: Claim, nonce: [u8; 32]) -> [u8; HELLO_BYTES] {
    let mut bytes = [0; HELLO_BYTES];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..10].copy_from_slice(&WIRE_VERSION.to_le_bytes());
    bytes[10] = claim.role.code();
    bytes[12..16].copy_from_slice(&claim.from.0.to_le_bytes());
    bytes[16..20].copy_from_slice(&claim.to.0.to_le_bytes());
    bytes[20..].copy_from_slice(&nonce);
    bytes
}

fn challenge(nonce: [u8; 32]) -> [u8; CHALLENGE_BYTES] {
    let mut bytes = [0; CHALLENGE_BYTES];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..10].copy_from_slice(&WIRE_VERSION.to_le_bytes());
    bytes[12..].copy_from_slice(&nonce);
    bytes
}

fn check_magic(bytes: &[u8]) -> Result<(), AuthError> {
    if bytes != MAGIC {
        return Err(AuthError::Stranger(bytes.escape_ascii().to_string()));
    }
    Ok(())
}

/// Magic and version, which every greeting starts with.
fn check_greeting(bytes: &[u8]) -> Result<(), AuthError> {
    check_magic(&bytes[..MAGIC.len()])?;
    let theirs = u16::from_le_bytes([bytes[8], bytes[9]]);
    if theirs != WIRE_VERSION {
        return Err(AuthError::WrongVersion { theirs, ours: WIRE_VERSION });
    }
    Ok(())
}

fn parse_hello(bytes: &[u8; HELLO_BYTES]) -> Result<Claim, AuthError> {
    check_greeting(bytes)?;
    let rank = |at: usize| Rank(u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]));
    let role = Role::of_code(bytes[10]).ok_or_else(|| AuthError::Stranger(format!("role {}", bytes[10])))?;
    Ok(Claim { role, from: rank(12), to: rank(16) })
}

fn verdict(secret: &Secret, transcript: &[u8], decided: Result<(), Refusal>) -> [u8; VERDICT_BYTES] {
    let status = decided.err().map_or(0, Refusal::code);
    let mut bytes = [0; VERDICT_BYTES];
    bytes[0] = status;
    let proof = secret.prove("listener", &[transcript, &[status]].concat());
    bytes[4..].copy_from_slice(proof.as_bytes());
    bytes
}

fn read_verdict(
    secret: &Secret,
    transcript: &[u8],
    bytes: &[u8; VERDICT_BYTES],
    theirs: Protect,
) -> Result<(), AuthError> {
    let refused = |why| Err(AuthError::Refused { claim: None, why });
    let mut proof = [0; PROOF_BYTES];
    proof.copy_from_slice(&bytes[4..]);
    let expected = secret.prove("listener", &[transcript, &bytes[..1]].concat());
    let ours = secret.protect;
    match (Refusal::of_code(bytes[0], theirs, ours), expected == blake3::Hash::from_bytes(proof)) {
        (_, false) => refused(Refusal::WrongSecret),
        (Some(why), true) => refused(why),
        // One that does not know of protection lets us in.
        (None, true) if bytes[0] == 0 && theirs != ours => refused(Refusal::Protection { theirs, ours }),
        (None, true) if bytes[0] == 0 => Ok(()),
        (None, true) => Err(AuthError::Stranger(format!("status {}", bytes[0]))),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;
    use crate::deadline::Socket;

    fn soon() -> Deadline {
        Deadline::after(Duration::from_secs(5))
    }

    fn secret(text: &str) -> Secret {
        Secret::from_text(text).unwrap()
    }

    const CLAIM: Claim = Claim { role: Role::Data, from: Rank(3), to: Rank(1) };

    /// Both sides of a handshake: what the dialer and what the listener make of it.
    fn meet(
        dialer: &Secret,
        listener: &Secret,
        admit: Result<(), Refusal>,
    ) -> (Result<(), AuthError>, Result<Claim, AuthError>) {
        let (a, b) = UnixStream::pair().unwrap();
        let (mut a, mut b) = (Socket::Unix(a), Socket::Unix(b));
        std::thread::scope(|scope| {
            let dialing = scope.spawn(move || dial(&mut a, dialer, CLAIM, soon()));
            let answered = answer(&mut b, listener, soon(), |_| admit);
            (dialing.join().unwrap().map(|_| ()), answered.map(|(claim, _)| claim))
        })
    }

    #[test]
    fn both_sides_agree_with_the_same_secret() {
        let s = secret("correct horse battery");
        let (dialed, answered) = meet(&s, &s, Ok(()));
        dialed.unwrap();
        assert_eq!(answered.unwrap(), CLAIM);
    }

    #[test]
    fn another_secret_is_noticed_on_both_sides() {
        let (dialed, answered) =
            meet(&secret("correct horse battery"), &secret("correct horse batterx"), Ok(()));
        let wrong =
            |e: AuthError| assert!(matches!(e, AuthError::Refused { why: Refusal::WrongSecret, .. }), "{e}");
        wrong(dialed.unwrap_err());
        wrong(answered.unwrap_err());
    }

    #[test]
    fn the_dialer_hears_why_it_is_refused() {
        let s = secret("correct horse battery");
        let (dialed, answered) = meet(&s, &s, Err(Refusal::DuplicateRank));
        assert_eq!(dialed.unwrap_err().to_string(), "turned away: this rank is here already");
        assert_eq!(answered.unwrap_err().to_string(), "r3: turned away: this rank is here already");
    }

    #[test]
    fn both_sides_have_to_protect_alike() {
        let s = |protect| secret("correct horse battery").protecting(protect);
        let (dialed, answered) = meet(&s(Protect::Encrypt), &s(Protect::None), Ok(()));
        let said = |e: AuthError| e.to_string().lines().next().unwrap().to_string();
        assert_eq!(
            said(dialed.unwrap_err()),
            "turned away: the other side has --protect none, this one encrypt"
        );
        assert_eq!(
            said(answered.unwrap_err()),
            "r3: turned away: the other side has --protect encrypt, this one none"
        );
        let (dialed, answered) = meet(&s(Protect::Sign), &s(Protect::Sign), Ok(()));
        dialed.unwrap();
        answered.unwrap();
    }

    #[test]
    fn another_version_hears_ours() {
        let (mut a, b) = UnixStream::pair().unwrap();
        let mut b = Socket::Unix(b);
        let mut old = hello(CLAIM, [7; 32]);
        old[8] = 99;
        a.write_all(&old).unwrap();
        let error = answer(&mut b, &secret("correct horse battery"), soon(), |_| Ok(())).unwrap_err();
        assert!(matches!(error, AuthError::WrongVersion { theirs: 99, ours: WIRE_VERSION }));
        let mut reply = [0; CHALLENGE_BYTES];
        read_exact_by(&mut Socket::Unix(a), &mut reply, soon()).unwrap();
        assert_eq!(reply[8..10], WIRE_VERSION.to_le_bytes());
    }

    #[test]
    fn a_proof_does_not_serve_twice() {
        // Everything a dialer once said, said again: the listener's fresh nonce makes it worthless.
        let s = secret("correct horse battery");
        let said = hello(CLAIM, [7; 32]);
        let old = [&said[..], &challenge([8; 32])[..]].concat();
        let proof = s.prove("dialer", &old);
        let (mut a, b) = UnixStream::pair().unwrap();
        a.write_all(&said).unwrap();
        a.write_all(proof.as_bytes()).unwrap();
        let error = answer(&mut Socket::Unix(b), &s, soon(), |_| Ok(())).unwrap_err();
        assert!(matches!(error, AuthError::Refused { why: Refusal::WrongSecret, .. }));
    }

    #[test]
    fn secrets_are_read_and_never_shown() {
        let s = Secret::generate().unwrap();
        assert_eq!(Secret::from_text(&format!(" {}\n", s.to_hex())).unwrap(), s);
        assert_eq!(format!("{s:?}"), "Secret(..)");
        assert_ne!(secret("correct horse battery"), secret("correct horse batterx"));
        assert!(Secret::from_text("short").unwrap_err().to_string().contains("5 B is too short"));
    }

    fn place(launcher: &'static str, addr: &str) -> Place {
        let (rank, world, local_rank, local_world) = (Rank(0), 2, 0, None);
        Place { rank, world, local_rank, local_world, master_addr: addr.into(), master_port: 1, launcher }
    }

    #[test]
    fn a_name_that_others_can_guess_is_no_secret_beyond_this_host() {
        let vars =
            |pairs: &[(&str, &str)]| pairs.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
        let slurm: Variables = vars(&[("SLURM_JOB_ID", "4711"), ("SLURM_STEP_ID", "0")]);
        let run = vars(&[("TORCHELASTIC_RUN_ID", "none"), ("MASTER_PORT", "29500")]);
        let pmi = vars(&[("PMI_JOBID", "7")]);
        for (launcher, variables) in [("Slurm", &slurm), ("torchrun", &run), ("PMI", &pmi)] {
            for addr in ["node1", "10.0.0.1", "0.0.0.0", "::"] {
                let error = Secret::of_job(&place(launcher, addr), variables).unwrap_err().to_string();
                let expected =
                    format!("the job that {launcher} started has no secret, and its ranks meet at {addr}");
                assert!(error.starts_with(&expected) && error.contains("openssl rand -hex 32"), "{error}");
            }
            for addr in ["127.0.0.1", "::1", "localhost"] {
                let (_, note) = Secret::of_job(&place(launcher, addr), variables).unwrap();
                assert!(note.unwrap().starts_with("note: no CROSSMESH_SECRET was given"));
            }
        }
        // One that was given, or drawn by lot, serves everywhere.
        let given = vars(&[(SECRET_VARIABLE, "sixteen letters at least")]);
        assert_eq!(Secret::of_job(&place("Slurm", "node1"), &given).unwrap().1, None);
        let lot = vars(&[("OMPI_MCA_orte_precondition_transports", "86154f6ac897253a-70a91866e5cbe81e")]);
        assert_eq!(Secret::of_job(&place("OpenMPI", "node1"), &lot).unwrap().1, None);
    }

    proptest! {
        #[test]
        fn garbage_never_gets_in(mut bytes in proptest::collection::vec(any::<u8>(), 0..200), ours: bool) {
            if ours && bytes.len() >= 12 {
                bytes[..8].copy_from_slice(&MAGIC);
                bytes[8..10].copy_from_slice(&WIRE_VERSION.to_le_bytes());
                bytes[10] = 1;
            }
            let (mut a, b) = UnixStream::pair().unwrap();
            a.write_all(&bytes).unwrap();
            a.shutdown(std::net::Shutdown::Write).unwrap();
            let answered = answer(&mut Socket::Unix(b), &secret("correct horse battery"), soon(), |_| Ok(()));
            prop_assert!(answered.is_err());
        }
    }
}
