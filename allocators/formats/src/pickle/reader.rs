//! A reader for pickles of protocols 2 to 5.
//!
//! A pickle is a program for a small stack machine. This machine runs it, but imports and calls
//! nothing.
//!
//! - It keeps only what the snapshot reader uses: lists, dictionaries, whole numbers, and text.
//! - An object fetched from the memo is the same object, not a copy, so shared frames are stored
//!   once.
//! - Stack traces are most of a snapshot's bytes. Text, call stacks and events are kept in a compact
//!   form, which `details` describes, so memory does not grow with the file alone.
//! - Protocols 2 to 5 are supported, of Python's pickler and of PyTorch's own. The latter marks
//!   values with their types by calls. A call evaluates to its first argument.

use super::{
    Word,
    details::{Details, EventRecord},
    word::Value,
};
use crate::names::{NameTable, StackTable};
use std::{
    collections::HashMap,
    error, fmt,
    io::{self, BufRead, Read},
};

/// The first byte of every pickle of protocol 2 or later.
pub(crate) const MAGIC: u8 = 0x80;
/// The newest supported protocol.
const NEWEST: u8 = 5;
/// The maximum number of objects and items, of 16 to 40 bytes each. A snapshot of a million events
/// has some ten million.
const MOST: usize = 1 << 26;
/// The longest line of text in a pickle: numbers and names of classes.
const LINE: u64 = 1 << 10;
/// The bytes that are kept of a longer text.
const TEXT: u64 = 1 << 12;

/// The objects of a pickle.
#[derive(Debug, Default)]
pub(crate) struct Objects {
    lists: Vec<ListBody>,
    dicts: Vec<DictBody>,
    details: Details,
}

#[derive(Debug)]
enum ListBody {
    Items(Vec<Value>),
    /// The list was a call stack, and is interned.
    Stack(u32),
}

#[derive(Debug)]
enum DictBody {
    /// Only entries whose key is a [`Word`].
    Pairs(Vec<(Word, Value)>),
    /// The dictionary was an event, and is now a record.
    Event(u32),
    /// The dictionary was a frame, and is interned.
    Frame(u32),
}

impl Objects {
    /// Returns the items of a list, or `None` if the value is not a list.
    pub(crate) fn list(&self, value: Value) -> Option<&[Value]> {
        match value {
            Value::List(place) => match self.lists.get(place as usize)? {
                ListBody::Items(items) => Some(items),
                ListBody::Stack(_) => None,
            },
            _ => None,
        }
    }

    /// Takes the names and call stacks. The numbers of [`Value::Text`] and [`Value::Stack`] are
    /// those of these tables.
    pub(crate) fn take_tables(&mut self) -> (NameTable, StackTable) {
        let details = &mut self.details;
        (std::mem::take(&mut details.names), std::mem::take(&mut details.stacks))
    }

    /// Returns whether the value is a dictionary.
    pub(crate) fn is_dict(&self, value: Value) -> bool {
        matches!(value, Value::Dict(_))
    }

    /// Returns the value of a key, or `None` if it is missing or `value` is not a dictionary.
    pub(crate) fn get(&self, value: Value, word: Word) -> Option<Value> {
        let Value::Dict(place) = value else { return None };
        match self.dicts.get(place as usize)? {
            DictBody::Pairs(pairs) => {
                pairs.iter().find(|(key, _)| *key == word).map(|&(_, value)| value)
            }
            DictBody::Event(event) => self.details.events.get(*event as usize)?.get(word),
            DictBody::Frame(_) => None,
        }
    }
}

/// The position and kind of an error in a pickle.
#[derive(Debug)]
pub(crate) struct PickleError {
    /// The offset of the instruction from 0, before compression.
    pub(crate) at: u64,
    /// The kind of the error.
    pub(crate) fault: PickleFault,
}

/// The errors of a pickle.
#[derive(Debug)]
pub(crate) enum PickleFault {
    /// It is truncated.
    Cut,
    /// It cannot be read, or decompressed.
    Io(io::Error),
    /// An unknown protocol.
    Protocol(u8),
    /// An instruction that snapshots do not use.
    Instruction(u8),
    /// An instruction that needs more values than the stack has.
    Underflow,
    /// An instruction that needs a value of another type.
    Mismatch,
    /// An invalid number, or a negative length.
    Number,
    /// A memo that was never stored.
    Memo(u64),
    /// More objects and items than the limit.
    TooLarge(usize),
    /// Bytes after its end.
    Behind,
}

impl fmt::Display for PickleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "byte {}: ", self.at)?;
        match &self.fault {
            PickleFault::Cut => f.write_str("cut off: the pickle ends before its end"),
            PickleFault::Io(e) => e.fmt(f),
            PickleFault::Protocol(version) => {
                write!(f, "pickle protocol {version}; {NEWEST} is the newest that is known")
            }
            PickleFault::Instruction(code) => {
                write!(f, "{code:#04x} is no instruction that a snapshot has")
            }
            PickleFault::Underflow => f.write_str("the pickle takes what it has not put there"),
            PickleFault::Mismatch => f.write_str("the pickle puts items into what holds none"),
            PickleFault::Number => f.write_str("a number that is none"),
            PickleFault::Memo(number) => write!(f, "memo {number} is asked for and was never put"),
            PickleFault::TooLarge(most) => write!(
                f,
                "more than {most} objects and items, which are all that are kept; record fewer events"
            ),
            PickleFault::Behind => f.write_str("the pickle ends here, and the file does not"),
        }
    }
}

impl error::Error for PickleError {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        match &self.fault {
            PickleFault::Io(e) => Some(e),
            _ => None,
        }
    }
}

/// Runs a pickle to its end, which must be the end of the file.
///
/// # Errors
/// [`PickleError`] with the first invalid instruction.
pub(crate) fn read(reader: &mut dyn BufRead) -> Result<(Objects, Value), PickleError> {
    bounded(reader, MOST)
}

/// As [`read`], with a limit on objects and items.
fn bounded(reader: &mut dyn BufRead, most: usize) -> Result<(Objects, Value), PickleError> {
    let mut machine = Machine {
        reader,
        at: 0,
        objects: Objects::default(),
        text: Vec::new(),
        stack: Vec::new(),
        marks: Vec::new(),
        memo: Vec::new(),
        scattered: HashMap::new(),
        items: 0,
        most,
    };
    let mut begun = 0;
    match machine.run(&mut begun) {
        Ok(value) => Ok((machine.objects, value)),
        Err(fault) => Err(PickleError { at: begun, fault }),
    }
}

struct Machine<'a> {
    reader: &'a mut dyn BufRead,
    /// The bytes of the current text.
    text: Vec<u8>,
    /// Bytes read so far.
    at: u64,
    objects: Objects,
    stack: Vec<Value>,
    /// Heights of the stack.
    marks: Vec<usize>,
    memo: Vec<Value>,
    /// Memos that were not numbered consecutively.
    scattered: HashMap<u64, Value>,
    /// Items of lists and dictionaries.
    items: usize,
    /// The limit on objects and items.
    most: usize,
}

type Done<T = ()> = Result<T, PickleFault>;

impl Machine<'_> {
    fn run(&mut self, begun: &mut u64) -> Done<Value> {
        loop {
            *begun = self.at;
            let code = self.byte()?;
            if code == b'.' {
                let value = self.pop()?;
                *begun = self.at;
                return match self.reader.fill_buf() {
                    Ok([]) => Ok(value),
                    Ok(_) => Err(PickleFault::Behind),
                    Err(e) => Err(reading(e)),
                };
            }
            self.step(code)?;
            if self.held() > self.most {
                return Err(PickleFault::TooLarge(self.most));
            }
        }
    }

    fn held(&self) -> usize {
        let Objects { lists, dicts, details } = &self.objects;
        let memos = self.memo.len() + self.scattered.len();
        let objects = lists.len() + dicts.len() + self.items + details.held();
        objects + self.stack.len() + self.marks.len() + memos
    }

    fn step(&mut self, code: u8) -> Done {
        match code {
            MAGIC => match self.byte()? {
                version if version > NEWEST => return Err(PickleFault::Protocol(version)),
                _ => {}
            },
            // A frame is a hint for readers that prefetch.
            0x95 => drop(self.bytes::<8>()?),
            b'(' => self.marks.push(self.stack.len()),
            b'0' => {
                // The popped item may be a mark.
                if self.marks.last() == Some(&self.stack.len()) {
                    self.marks.pop();
                } else {
                    self.pop()?;
                }
            }
            b'1' => drop(self.pop_mark()?),
            b'2' => {
                let top = self.pop()?;
                self.stack.extend([top, top]);
            }
            // None, true, false, the empty tuple, the empty set.
            b'N' | 0x88 | 0x89 | b')' | 0x8f => self.stack.push(Value::Other),
            b'K' => self.int(|m| Ok(m.byte()?.into()))?,
            b'M' => self.int(|m| Ok(u16::from_le_bytes(m.bytes()?).into()))?,
            b'J' => self.int(|m| Ok(i32::from_le_bytes(m.bytes()?).into()))?,
            0x8a => {
                let length = self.byte()?.into();
                self.long(length)?;
            }
            0x8b => {
                let length = self.length()?;
                self.long(length)?;
            }
            b'I' | b'L' => {
                let line = self.line()?;
                let text = line.strip_suffix('L').unwrap_or(&line);
                let value = text.parse().map_err(|_| PickleFault::Number)?;
                self.stack.push(Value::Int(value));
            }
            b'G' => {
                self.bytes::<8>()?;
                self.stack.push(Value::Other);
            }
            b'F' | b'V' | b'S' => {
                self.line()?;
                self.stack.push(Value::Other);
            }
            0x8c | b'U' => {
                let length = self.byte()?.into();
                self.string(length)?;
            }
            b'X' | b'T' => {
                let length = self.length()?;
                self.string(length)?;
            }
            0x8d => {
                let length = u64::from_le_bytes(self.bytes()?);
                self.string(length)?;
            }
            b'C' => {
                let length = self.byte()?.into();
                self.pass(length)?;
            }
            b'B' => {
                let length = u32::from_le_bytes(self.bytes()?).into();
                self.pass(length)?;
            }
            0x8e | 0x96 => {
                let length = u64::from_le_bytes(self.bytes()?);
                self.pass(length)?;
            }
            b']' => self.new_list(Vec::new())?,
            b'l' => {
                let items = self.pop_mark()?;
                self.new_list(items)?;
            }
            b'a' => {
                let item = self.pop()?;
                self.append(&[item])?;
            }
            b'e' => {
                let items = self.pop_mark()?;
                self.append(&items)?;
            }
            0x85..=0x87 => {
                let count = usize::from(code - 0x84);
                let from = self.above_mark(count)?;
                let items = self.stack.split_off(from);
                self.new_tuple(items)?;
            }
            b't' => {
                let items = self.pop_mark()?;
                self.new_tuple(items)?;
            }
            b'}' => self.new_dict(&[])?,
            b'd' => {
                let items = self.pop_mark()?;
                self.new_dict(&items)?;
            }
            b's' => {
                let from = self.above_mark(2)?;
                let items = self.stack.split_off(from);
                self.set(&items)?;
            }
            b'u' => {
                let items = self.pop_mark()?;
                self.set(&items)?;
            }
            // The contents of sets are not used.
            0x90 => drop(self.pop_mark()?),
            0x91 => {
                self.pop_mark()?;
                self.stack.push(Value::Other);
            }
            b'h' => {
                let number = self.byte()?.into();
                self.recall(number)?;
            }
            b'j' => {
                let number = u32::from_le_bytes(self.bytes()?).into();
                self.recall(number)?;
            }
            b'q' => {
                let number = self.byte()?.into();
                self.remember(number)?;
            }
            b'r' => {
                let number = u32::from_le_bytes(self.bytes()?).into();
                self.remember(number)?;
            }
            0x94 => self.remember(self.memo.len() as u64)?,
            b'c' => {
                self.line()?;
                self.line()?;
                self.stack.push(Value::Other);
            }
            0x93 => {
                let from = self.above_mark(2)?;
                self.stack.truncate(from);
                self.stack.push(Value::Other);
            }
            b'R' | 0x81 => {
                let arguments = self.pop()?;
                self.pop()?;
                let first = self.objects.list(arguments).and_then(|items| items.first().copied());
                self.stack.push(first.unwrap_or(Value::Other));
            }
            0x92 => {
                let from = self.above_mark(3)?;
                self.stack.truncate(from);
                self.stack.push(Value::Other);
            }
            // The state of an object is dropped; the object stays.
            b'b' => {
                let from = self.above_mark(2)?;
                self.stack.truncate(from + 1);
            }
            _ => return Err(PickleFault::Instruction(code)),
        }
        Ok(())
    }

    fn byte(&mut self) -> Done<u8> {
        Ok(self.bytes::<1>()?[0])
    }

    fn bytes<const N: usize>(&mut self) -> Done<[u8; N]> {
        let mut bytes = [0; N];
        self.reader.read_exact(&mut bytes).map_err(reading)?;
        self.at += N as u64;
        Ok(bytes)
    }

    /// Reads a signed length of four bytes.
    fn length(&mut self) -> Done<u64> {
        u64::try_from(i32::from_le_bytes(self.bytes()?)).map_err(|_| PickleFault::Number)
    }

    fn line(&mut self) -> Done<String> {
        let mut line = Vec::new();
        let read = self.reader.take(LINE).read_until(b'\n', &mut line).map_err(reading)?;
        self.at += read as u64;
        if line.pop() != Some(b'\n') {
            return Err(if read as u64 == LINE { PickleFault::Number } else { PickleFault::Cut });
        }
        String::from_utf8(line).map_err(|_| PickleFault::Number)
    }

    /// Skips bytes without keeping them.
    fn skip(&mut self, bytes: u64) -> Done {
        let read = io::copy(&mut self.reader.take(bytes), &mut io::sink()).map_err(reading)?;
        self.at += read;
        if read == bytes { Ok(()) } else { Err(PickleFault::Cut) }
    }

    fn pass(&mut self, bytes: u64) -> Done {
        self.skip(bytes)?;
        self.stack.push(Value::Other);
        Ok(())
    }

    fn int(&mut self, read: impl FnOnce(&mut Self) -> Done<i64>) -> Done {
        let value = read(self)?;
        self.stack.push(Value::Int(value));
        Ok(())
    }

    /// Reads a little-endian two's-complement number of `length` bytes.
    fn long(&mut self, length: u64) -> Done {
        let mut bytes = [0; 16];
        let Some(place) = usize::try_from(length).ok().and_then(|length| bytes.get_mut(..length))
        else {
            return self.pass(length);
        };
        self.reader.read_exact(place).map_err(reading)?;
        self.at += length;
        let negative = place.last().is_some_and(|high| *high >= 0x80);
        if negative {
            bytes[length as usize..].fill(0xff);
        }
        let value = i64::try_from(i128::from_le_bytes(bytes)).map_or(Value::Other, Value::Int);
        self.stack.push(value);
        Ok(())
    }

    fn string(&mut self, length: u64) -> Done {
        self.text.clear();
        let read = (&mut self.reader).take(length.min(TEXT)).read_to_end(&mut self.text);
        let read = read.map_err(reading)? as u64;
        self.at += read;
        if read < length.min(TEXT) {
            return Err(PickleFault::Cut);
        }
        if read < length {
            self.skip(length - read)?;
        }
        let value = match Word::of(&self.text) {
            Some(word) => Value::Word(word),
            None => Value::Text(self.objects.details.text(&self.text)),
        };
        self.stack.push(value);
        Ok(())
    }

    /// Returns the index of the topmost `count` values. All of them must be above the last mark.
    fn above_mark(&self, count: usize) -> Done<usize> {
        let floor = self.marks.last().copied().unwrap_or(0);
        self.stack
            .len()
            .checked_sub(count)
            .filter(|from| *from >= floor)
            .ok_or(PickleFault::Underflow)
    }

    fn pop(&mut self) -> Done<Value> {
        let from = self.above_mark(1)?;
        let value = self.stack.get(from).copied().ok_or(PickleFault::Underflow)?;
        self.stack.truncate(from);
        Ok(value)
    }

    fn pop_mark(&mut self) -> Done<Vec<Value>> {
        let mark = self.marks.pop().ok_or(PickleFault::Underflow)?;
        if mark > self.stack.len() {
            return Err(PickleFault::Underflow);
        }
        Ok(self.stack.split_off(mark))
    }

    fn top(&self) -> Done<Value> {
        let place = self.above_mark(1)?;
        self.stack.get(place).copied().ok_or(PickleFault::Underflow)
    }

    fn new_list(&mut self, items: Vec<Value>) -> Done {
        let place =
            u32::try_from(self.objects.lists.len()).map_err(|_| PickleFault::TooLarge(MOST))?;
        items.iter().for_each(|item| self.compact_event(*item));
        self.items += items.len();
        self.objects.lists.push(ListBody::Items(items));
        self.stack.push(Value::List(place));
        Ok(())
    }

    /// A tuple without objects is not kept.
    fn new_tuple(&mut self, items: Vec<Value>) -> Done {
        if items.iter().any(|item| matches!(item, Value::List(_) | Value::Dict(_))) {
            return self.new_list(items);
        }
        self.stack.push(Value::Other);
        Ok(())
    }

    fn append(&mut self, items: &[Value]) -> Done {
        match self.top()? {
            Value::List(place) => {
                items.iter().for_each(|item| self.compact_event(*item));
                match self.objects.lists.get_mut(place as usize) {
                    Some(ListBody::Items(list)) => list.extend_from_slice(items),
                    _ => return Err(PickleFault::Mismatch),
                }
                self.items += items.len();
                Ok(())
            }
            Value::Other => Ok(()),
            _ => Err(PickleFault::Mismatch),
        }
    }

    fn new_dict(&mut self, items: &[Value]) -> Done {
        let place =
            u32::try_from(self.objects.dicts.len()).map_err(|_| PickleFault::TooLarge(MOST))?;
        self.objects.dicts.push(DictBody::Pairs(Vec::new()));
        self.stack.push(Value::Dict(place));
        self.set(items)
    }

    /// Adds alternating keys and values to the dictionary on top.
    fn set(&mut self, items: &[Value]) -> Done {
        let place = match self.top()? {
            Value::Dict(place) => place,
            Value::Other => return Ok(()),
            _ => return Err(PickleFault::Mismatch),
        };
        let (pairs, rest) = items.as_chunks::<2>();
        if !rest.is_empty() {
            return Err(PickleFault::Underflow);
        }
        for &[key, value] in pairs {
            let Value::Word(key) = key else { continue };
            let value = if key == Word::Frames { self.compact_stack(value) } else { value };
            let Some(DictBody::Pairs(dict)) = self.objects.dicts.get_mut(place as usize) else {
                return Err(PickleFault::Mismatch);
            };
            match dict.iter_mut().find(|(there, _)| *there == key) {
                Some((_, there)) => *there = value,
                None => {
                    dict.push((key, value));
                    self.items += 1;
                }
            }
        }
        Ok(())
    }

    /// Turns a finished dictionary that is an event into a record.
    fn compact_event(&mut self, value: Value) {
        let Objects { dicts, details, .. } = &mut self.objects;
        if let Value::Dict(place) = value
            && let Some(body) = dicts.get_mut(place as usize)
            && let DictBody::Pairs(pairs) = body
            && let Some(record) = EventRecord::of(pairs, details)
            && let Ok(event) = u32::try_from(details.events.len())
        {
            self.items -= pairs.len();
            details.events.push(record);
            *body = DictBody::Event(event);
        }
    }

    /// Turns a finished list of frames into a call stack.
    fn compact_stack(&mut self, value: Value) -> Value {
        let Value::List(place) = value else { return value };
        let items = match self.objects.lists.get_mut(place as usize) {
            Some(ListBody::Items(items)) => std::mem::take(items),
            Some(ListBody::Stack(stack)) => return Value::Stack(*stack),
            None => return value,
        };
        self.items -= items.len();
        let mut frames = Vec::with_capacity(items.len());
        for item in items {
            let [name, file, line] =
                [Word::Name, Word::Filename, Word::Line].map(|word| self.objects.get(item, word));
            let Objects { dicts, details, .. } = &mut self.objects;
            let Value::Dict(frame) = item else { continue };
            match dicts.get_mut(frame as usize) {
                Some(DictBody::Frame(frame)) => frames.push(*frame),
                Some(body @ DictBody::Pairs(_)) => {
                    let frame = details.frame(name, file, line);
                    if let DictBody::Pairs(pairs) = std::mem::replace(body, DictBody::Frame(frame))
                    {
                        self.items -= pairs.len();
                    }
                    frames.push(frame);
                }
                _ => {}
            }
        }
        let stack = self.objects.details.stack(&frames);
        if let Some(body) = self.objects.lists.get_mut(place as usize) {
            *body = ListBody::Stack(stack);
        }
        Value::Stack(stack)
    }

    fn remember(&mut self, number: u64) -> Done {
        let value = self.top()?;
        let next = self.memo.len() as u64;
        match usize::try_from(number).ok().and_then(|number| self.memo.get_mut(number)) {
            Some(there) => *there = value,
            None if number == next => self.memo.push(value),
            None => drop(self.scattered.insert(number, value)),
        }
        Ok(())
    }

    fn recall(&mut self, number: u64) -> Done {
        let there = usize::try_from(number).ok().and_then(|number| self.memo.get(number));
        let value = there.or_else(|| self.scattered.get(&number)).copied();
        self.stack.push(value.ok_or(PickleFault::Memo(number))?);
        Ok(())
    }
}

/// Converts a read error.
fn reading(e: io::Error) -> PickleFault {
    if e.kind() == io::ErrorKind::UnexpectedEof { PickleFault::Cut } else { PickleFault::Io(e) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_file_that_unpacks_to_more_than_any_memory_ends_before_it_has_it() {
        // Lists; one item repeated; marks; memos that are not consecutive.
        let endless: [(&[u8], &[u8]); 4] =
            [(b"\x80\x04", b"]"), (b"\x80\x04]", b"Na"), (b"\x80\x04", b"("), (b"\x80\x04]", b"2")];
        for (head, body) in endless {
            let bytes = [head, &body.repeat(5000)].concat();
            let error = bounded(&mut bytes.as_slice(), 1000).map(|_| ()).unwrap_err();
            assert!(matches!(error.fault, PickleFault::TooLarge(1000)), "{body:?}: {error}");
            assert!(error.to_string().contains("more than 1000 objects and items"), "{error}");
            assert!(error.at < 3000, "{body:?}: {error}");
        }
    }

    #[test]
    fn a_call_stands_for_its_first_argument_and_is_not_made() {
        // PyTorch's own pickler: restore_type_tag(([1, 2],), "List[int]")
        let bytes =
            b"\x80\x02ctorch.jit._pickle\nrestore_type_tag\n(]q\x00(K\x01K\x02eX\x09\x00\x00\x00List[int]tR.";
        let (objects, value) = read(&mut bytes.as_slice()).unwrap();
        assert_eq!(objects.list(value), Some(&[Value::Int(1), Value::Int(2)][..]));
    }

    #[test]
    fn an_object_met_again_is_the_same_object() {
        // x = []; [x, x], with an item added through the first after both are stored.
        let (objects, value) = read(&mut &b"\x80\x04](]\x94h\x00e\x94h\x00K\x07a0."[..]).unwrap();
        let items = objects.list(value).unwrap();
        assert_eq!(items[0], items[1]);
        assert_eq!(objects.list(items[1]), Some(&[Value::Int(7)][..]));
    }

    #[test]
    fn numbers_of_every_form_are_read() {
        let table: [(&[u8], Value); 9] = [
            (b"K\xff", Value::Int(255)),
            (b"M\x00\x01", Value::Int(256)),
            (b"J\xff\xff\xff\xff", Value::Int(-1)),
            (b"\x8a\x00", Value::Int(0)),
            (b"\x8a\x01\xff", Value::Int(-1)),
            (b"\x8a\x09\xff\xff\xff\xff\xff\xff\xff\x7f\x00", Value::Int(i64::MAX)),
            (b"\x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\x00", Value::Other),
            (b"\x8b\x02\x00\x00\x00\x00\x80", Value::Int(-32768)),
            (b"L-12L\n", Value::Int(-12)),
        ];
        for (text, expected) in table {
            let bytes = [b"\x80\x02", text, b"."].concat();
            assert_eq!(read(&mut bytes.as_slice()).unwrap().1, expected, "{text:?}");
        }
    }
}
