//! Nothing waits forever: a point in time that every blocking call is held to, and streams that know how.

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// A socket's own clock is coarse; shorter waits than this would be none.
const SHORTEST_WAIT: Duration = Duration::from_millis(1);

/// When to give up, and how long that was from the start.
#[derive(Debug, Clone, Copy)]
pub struct Deadline {
    at: Instant,
    allowed: Duration,
}

impl Deadline {
    pub fn after(allowed: Duration) -> Self {
        Self { at: now() + allowed, allowed }
    }

    /// The earlier of this one and one `allowed` from now.
    pub fn or_after(self, allowed: Duration) -> Self {
        self.or_before(Self::after(allowed))
    }

    /// The earlier of the two.
    pub fn or_before(self, other: Self) -> Self {
        if other.at < self.at { other } else { self }
    }

    /// The time left, or none.
    pub fn left(self) -> Option<Duration> {
        let left = self.at.saturating_duration_since(now());
        (!left.is_zero()).then_some(left)
    }

    pub fn passed(self) -> bool {
        self.left().is_none()
    }

    /// How long ago it was set.
    pub fn elapsed(self) -> Duration {
        now().saturating_duration_since(self.at.checked_sub(self.allowed).unwrap_or(self.at))
    }

    /// How long was allowed, for messages.
    pub fn allowed_s(self) -> f64 {
        self.allowed.as_secs_f64()
    }
}

#[expect(clippy::disallowed_methods, reason = "this module is where waiting meets the clock")]
fn now() -> Instant {
    Instant::now()
}

/// Why nothing more comes from a stream, or goes to it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StreamError {
    #[error("nothing came within {0:.1} s")]
    TimedOut(f64),
    #[error("the other side closed the connection")]
    Closed,
    #[error(transparent)]
    Io(io::Error),
}

/// A connected stream whose calls can be held to a deadline.
pub trait Stream: Read + Write + Send {
    fn set_timeouts(&self, left: Duration) -> io::Result<()>;
    /// The other end, for messages.
    fn peer_name(&self) -> String;
}

/// A connection to another process: over the network, or inside the host.
#[derive(Debug)]
pub enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Socket {
    /// Blocking calls without a time limit, as a stream is when it is new.
    pub fn without_timeouts(self) -> io::Result<Self> {
        match &self {
            Socket::Tcp(stream) => stream.set_read_timeout(None).and(stream.set_write_timeout(None)),
            Socket::Unix(stream) => stream.set_read_timeout(None).and(stream.set_write_timeout(None)),
        }?;
        Ok(self)
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Socket::Tcp(stream) => stream.as_fd(),
            Socket::Unix(stream) => stream.as_fd(),
        }
    }
}

impl Read for Socket {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        match self {
            Socket::Tcp(stream) => stream.read(buf),
            Socket::Unix(stream) => stream.read(buf),
        }
    }
}

impl Write for Socket {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        match self {
            Socket::Tcp(stream) => stream.write(buf),
            Socket::Unix(stream) => stream.write(buf),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Stream for Socket {
    fn set_timeouts(&self, left: Duration) -> io::Result<()> {
        let left = Some(left.max(SHORTEST_WAIT));
        match self {
            Socket::Tcp(stream) => stream.set_read_timeout(left).and(stream.set_write_timeout(left)),
            Socket::Unix(stream) => stream.set_read_timeout(left).and(stream.set_write_timeout(left)),
        }
    }

    fn peer_name(&self) -> String {
        match self {
            Socket::Tcp(stream) => stream.peer_addr().map_or("a closed socket".into(), |a| a.to_string()),
            Socket::Unix(_) => "a process of this host".into(),
        }
    }
}

/// Fills `buf`, or says why not.
pub fn read_exact_by(
    stream: &mut impl Stream,
    mut buf: &mut [u8],
    deadline: Deadline,
) -> Result<(), StreamError> {
    while !buf.is_empty() {
        let read = once_by(stream, deadline, |stream| stream.read(buf))?;
        buf = &mut buf[read..];
    }
    Ok(())
}

/// Reads what is there, at least a byte.
pub fn read_some_by(
    stream: &mut impl Stream,
    buf: &mut [u8],
    deadline: Deadline,
) -> Result<usize, StreamError> {
    once_by(stream, deadline, |stream| stream.read(buf))
}

/// Writes all of `buf`, or says why not.
pub fn write_all_by(stream: &mut impl Stream, mut buf: &[u8], deadline: Deadline) -> Result<(), StreamError> {
    while !buf.is_empty() {
        let written = once_by(stream, deadline, |stream| stream.write(buf))?;
        buf = &buf[written..];
    }
    Ok(())
}

/// One call that moves at least a byte.
fn once_by<S: Stream>(
    stream: &mut S,
    deadline: Deadline,
    mut call: impl FnMut(&mut S) -> io::Result<usize>,
) -> Result<usize, StreamError> {
    loop {
        let left = deadline.left().ok_or(StreamError::TimedOut(deadline.allowed_s()))?;
        stream.set_timeouts(left).map_err(StreamError::Io)?;
        match call(stream) {
            Ok(0) => return Err(StreamError::Closed),
            Ok(moved) => return Ok(moved),
            Err(error) => match error.kind() {
                ErrorKind::Interrupted | ErrorKind::WouldBlock | ErrorKind::TimedOut => {}
                ErrorKind::ConnectionReset | ErrorKind::BrokenPipe | ErrorKind::UnexpectedEof => {
                    return Err(StreamError::Closed);
                }
                _ => return Err(StreamError::Io(error)),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (Socket, Socket) {
        let (a, b) = UnixStream::pair().unwrap();
        (Socket::Unix(a), Socket::Unix(b))
    }

    #[test]
    fn a_silent_peer_is_given_up() {
        let (mut a, _b) = pair();
        let result = read_exact_by(&mut a, &mut [0; 4], Deadline::after(Duration::from_millis(30)));
        assert!(matches!(result, Err(StreamError::TimedOut(_))));
    }

    #[test]
    fn a_closed_peer_is_noticed_at_once() {
        let (mut a, b) = pair();
        drop(b);
        let result = read_exact_by(&mut a, &mut [0; 4], Deadline::after(Duration::from_secs(60)));
        assert!(matches!(result, Err(StreamError::Closed)));
    }

    #[test]
    fn bytes_that_trickle_still_count() {
        let (mut a, mut b) = pair();
        let writer = std::thread::Builder::new().spawn(move || {
            for byte in 0..4u8 {
                b.write_all(&[byte]).unwrap();
            }
            b
        });
        let mut buf = [0; 4];
        read_exact_by(&mut a, &mut buf, Deadline::after(Duration::from_secs(5))).unwrap();
        assert_eq!(buf, [0, 1, 2, 3]);
        drop(writer.unwrap().join().unwrap());
    }
}
