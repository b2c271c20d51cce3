//! Decompression of files, detected by their first bytes, with a bound on the memory that a file
//! may require.

use flate2::bufread::MultiGzDecoder;
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};
use std::{
    error, fmt,
    io::{self, BufRead, BufReader, Read},
};
use xz4rust::{DICT_SIZE_PROFILE_0, XzDecoder, XzError, XzNextBlockResult};

/// The first bytes of each format.
const XZ: &[u8] = &[0xFD, b'7', b'z', b'X', b'Z', 0];
const GZIP: &[u8] = &[0x1F, 0x8B];
const ZSTD: &[u8] = &[0x28, 0xB5, 0x2F, 0xFD];
/// The number of bytes that identify the format.
pub(super) const MAGIC: usize = XZ.len();
/// The maximum window in bytes: enough for `zstd --long`, and twice what `xz -9` needs.
pub(super) const MOST: u64 = 128 << 20;

/// The error for a file that needs more than [`MOST`].
#[derive(Debug)]
pub(super) struct NeedsMemory {
    /// Bytes that it needs.
    pub(super) bytes: u64,
}

impl fmt::Display for NeedsMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes are needed to decompress it", self.bytes)
    }
}

impl error::Error for NeedsMemory {}

/// Decompresses `raw`, which begins with `first`. Uncompressed data passes unchanged.
pub(super) fn reader(first: &[u8], raw: impl BufRead + 'static) -> Box<dyn BufRead> {
    fn buffered(reader: impl Read + 'static) -> Box<dyn BufRead> {
        Box::new(BufReader::with_capacity(1 << 16, reader))
    }
    if first.starts_with(XZ) {
        buffered(Xz::new(raw))
    } else if first.starts_with(GZIP) {
        buffered(MultiGzDecoder::new(raw))
    } else if first.starts_with(ZSTD) {
        buffered(Zstd::new(raw))
    } else {
        Box::new(raw)
    }
}

fn invalid(error: impl Into<Box<dyn error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

/// Decodes consecutive xz streams.
struct Xz<R> {
    inner: R,
    decoder: Box<XzDecoder<'static>>,
    /// Whether a stream has ended and the next has not begun.
    between: bool,
}

impl<R: BufRead> Xz<R> {
    fn new(inner: R) -> Self {
        let decoder = XzDecoder::in_heap_with_alloc_dict_size(DICT_SIZE_PROFILE_0, MOST as usize);
        Self { inner, decoder, between: false }
    }
}

impl<R: BufRead> Read for Xz<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if into.is_empty() {
            return Ok(0);
        }
        loop {
            let input = self.inner.fill_buf()?;
            if self.between {
                // There may be zero padding between streams.
                let zeros = input.iter().take_while(|byte| **byte == 0).count();
                match (zeros, input.len()) {
                    (_, 0) => return Ok(0),
                    (0, _) => {
                        self.decoder.reset();
                        self.between = false;
                    }
                    _ => {
                        self.inner.consume(zeros);
                        continue;
                    }
                }
            }
            if input.is_empty() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let (taken, made) = match self.decoder.decode(input, into) {
                Ok(XzNextBlockResult::NeedMoreData(0, 0)) => {
                    return Err(invalid("it makes no progress"));
                }
                Ok(XzNextBlockResult::NeedMoreData(taken, made)) => (taken, made),
                Ok(XzNextBlockResult::EndOfStream(taken, made)) => {
                    self.between = true;
                    (taken, made)
                }
                Err(XzError::DictionaryTooLarge(bytes)) => {
                    return Err(invalid(NeedsMemory { bytes }));
                }
                Err(error) => return Err(invalid(error)),
            };
            self.inner.consume(taken);
            if made > 0 {
                return Ok(made);
            }
        }
    }
}

/// Decodes consecutive zstd frames.
struct Zstd<R> {
    inner: R,
    decoder: FrameDecoder,
    within: bool,
}

impl<R: BufRead> Zstd<R> {
    fn new(inner: R) -> Self {
        let mut decoder = FrameDecoder::new();
        decoder.set_max_window_size(MOST);
        Self { inner, decoder, within: false }
    }

    /// Converts a decoder error. A truncated file is one whose reader has reached its end.
    fn refused(&mut self, error: ruzstd::decoding::errors::FrameDecoderError) -> io::Error {
        use ruzstd::decoding::errors::{FrameDecoderError as E, FrameHeaderError};
        match error {
            E::WindowSizeTooBig { requested: bytes, .. }
            | E::FrameHeaderError(FrameHeaderError::WindowTooBig { got: bytes })
            | E::FailedToInitialize(FrameHeaderError::WindowTooBig { got: bytes }) => {
                invalid(NeedsMemory { bytes })
            }
            other => match self.inner.fill_buf() {
                Ok([]) => io::Error::new(io::ErrorKind::UnexpectedEof, other),
                _ => invalid(other),
            },
        }
    }
}

impl<R: BufRead> Read for Zstd<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if into.is_empty() {
            return Ok(0);
        }
        loop {
            if !self.within {
                if self.inner.fill_buf()?.is_empty() {
                    return Ok(0);
                }
                self.decoder.init(&mut self.inner).map_err(|e| self.refused(e))?;
                self.within = true;
            }
            if self.decoder.can_collect() > 0 || self.decoder.is_finished() {
                match self.decoder.read(into)? {
                    0 => {
                        let sums = (
                            self.decoder.get_checksum_from_data(),
                            self.decoder.get_calculated_checksum(),
                        );
                        if let (Some(expected), Some(found)) = sums
                            && expected != found
                        {
                            return Err(invalid("its checksum is another"));
                        }
                        self.within = false;
                        continue;
                    }
                    made => return Ok(made),
                }
            }
            let decoded =
                self.decoder.decode_blocks(&mut self.inner, BlockDecodingStrategy::UptoBlocks(1));
            decoded.map_err(|e| self.refused(e))?;
        }
    }
}
