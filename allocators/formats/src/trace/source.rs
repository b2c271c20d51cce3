//! Reads files as rows of fields.

use super::{
    TraceError,
    compressed::{self, NeedsMemory},
    error::Fault,
};
use std::{
    fs::File,
    io::{self, BufRead, BufReader, Cursor, Read},
    path::Path,
};

/// The maximum length of a row. It bounds the memory for a file that is not text.
const MAX_ROW: u64 = 4096;
/// The mark of the byte order that some editors and shells write before text.
const ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// The rows of a file, one at a time. Memory does not grow with the file.
pub(crate) struct TraceSource {
    reader: Box<dyn BufRead>,
    /// The number of the row in `line`, counted from 1.
    row: u64,
    line: Vec<u8>,
    /// Whether the row in `line` was too long, so that its rest comes next.
    is_partial: bool,
}

impl TraceSource {
    /// Opens the file at `path`, or standard input for `-`. Compression is detected by the
    /// contents.
    pub(crate) fn open(path: &Path) -> Result<Self, TraceError> {
        if path.as_os_str() == "-" {
            return Self::new(io::stdin().lock());
        }
        let file = File::open(path).map_err(|e| TraceError::whole(Fault::Io(e)))?;
        Self::new(BufReader::with_capacity(1 << 16, file))
    }

    /// Reads from any reader.
    pub(crate) fn new(mut raw: impl BufRead + 'static) -> Result<Self, TraceError> {
        let mut first = Vec::with_capacity(compressed::MAGIC);
        raw.by_ref()
            .take(compressed::MAGIC as u64)
            .read_to_end(&mut first)
            .map_err(|e| TraceError::whole(Fault::Io(e)))?;
        let reader = compressed::reader(&first.clone(), Cursor::new(first).chain(raw));
        Ok(Self { reader, row: 0, line: Vec::with_capacity(128), is_partial: false })
    }

    /// Returns whether the first byte, before compression, is `byte`.
    pub(crate) fn begins_with(&mut self, byte: u8) -> Result<bool, TraceError> {
        let first = self.reader.fill_buf().map_err(|e| TraceError::whole(reading(e)))?;
        Ok(first.first() == Some(&byte))
    }

    /// Returns the remaining bytes, before compression.
    pub(crate) fn bytes(&mut self) -> &mut dyn BufRead {
        &mut *self.reader
    }

    /// Returns the next row and its number, counted from 1, or `None` at the end. A mark of the
    /// byte order before the first row is left out.
    ///
    /// After [`Fault::NoText`] and [`Fault::CutRow`], the next call returns the row after it.
    pub(crate) fn next_row(&mut self) -> Result<Option<(u64, &str)>, TraceError> {
        self.line.clear();
        self.row += 1;
        let row = Some(self.row);
        let failed = |e| TraceError { row, fault: reading(e) };
        if std::mem::take(&mut self.is_partial) {
            self.reader.skip_until(b'\n').map_err(failed)?;
        }
        let read = self.reader.by_ref().take(MAX_ROW).read_until(b'\n', &mut self.line);
        let read = read.map_err(failed)? as u64;
        if read == 0 {
            return Ok(None);
        }
        let is_whole = self.line.pop_if(|byte| *byte == b'\n').is_some();
        if self.row == 1 && self.line.starts_with(ORDER_MARK) {
            self.line.drain(..ORDER_MARK.len());
        }
        if !is_whole {
            self.is_partial = read == MAX_ROW;
            let fault = if self.is_partial { Fault::NoText } else { Fault::CutRow };
            return Err(TraceError { row, fault });
        }
        self.line.pop_if(|byte| *byte == b'\r');
        match text(&self.line) {
            Some(line) => Ok(Some((self.row, line))),
            None => Err(TraceError { row, fault: Fault::NoText }),
        }
    }
}

fn text(line: &[u8]) -> Option<&str> {
    std::str::from_utf8(line).ok().filter(|line| !line.contains('\0'))
}

/// Converts a read error. The decompressor distinguishes truncated and corrupt files by the error
/// kind.
fn reading(e: io::Error) -> Fault {
    if let Some(needs) = e.get_ref().and_then(|inner| inner.downcast_ref::<NeedsMemory>()) {
        return Fault::TooMuchMemory { bytes: needs.bytes, most: compressed::MOST };
    }
    match e.kind() {
        io::ErrorKind::UnexpectedEof => Fault::CutStream,
        io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported => {
            Fault::BadStream(e.to_string())
        }
        _ => Fault::Io(e),
    }
}
