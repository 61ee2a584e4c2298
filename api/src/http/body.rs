//! Bodies of replies: whole, or lines that come as events happen.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use http_body_util::Full;
use hyper::body::{Body as HttpBody, Bytes, Frame, SizeHint};
use serde_json::Value;

use super::transport::Owed;
use crate::dialect::json::ascii;
use crate::events::Listener;

/// A line and who hears the next one.
type Next = Pin<Box<dyn Future<Output = (Listener, Option<Value>)>>>;

/// A body, and who hears that all of it was taken.
pub(super) struct Body {
    content: Content,
    /// Dropped with the body.
    _owed: Option<Owed>,
}

/// What a body has.
enum Content {
    /// All of it.
    Whole(Full<Bytes>),
    /// Lines that are known, and then those that come.
    Events {
        /// Not sent yet.
        first: Option<Bytes>,
        /// The one that comes.
        next: Next,
    },
}

impl Body {
    /// All of a body.
    pub(super) fn whole(whole: Full<Bytes>) -> Self {
        Self { content: Content::Whole(whole), _owed: None }
    }

    /// Lines of JSON.
    pub(super) fn events(first: Vec<Value>, listener: Listener) -> Self {
        let first: Vec<u8> = first.iter().flat_map(line).collect();
        let content = Content::Events { first: (!first.is_empty()).then(|| first.into()), next: hear(listener) };
        Self { content, _owed: None }
    }

    /// The same, for a client to whom it is owed.
    pub(super) fn owed(self, owed: Owed) -> Self {
        Self { _owed: Some(owed), ..self }
    }
}

fn hear(mut listener: Listener) -> Next {
    Box::pin(async move {
        let value = listener.next().await;
        (listener, value)
    })
}

fn line(value: &Value) -> Vec<u8> {
    let mut line = ascii(value);
    line.push(b'\n');
    line
}

impl HttpBody for Body {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match &mut self.get_mut().content {
            Content::Whole(whole) => Pin::new(whole).poll_frame(context),
            Content::Events { first, next } => {
                if let Some(first) = first.take() {
                    return Poll::Ready(Some(Ok(Frame::data(first))));
                }
                next.as_mut().poll(context).map(|(listener, value)| {
                    let value = value?;
                    *next = hear(listener);
                    Some(Ok(Frame::data(line(&value).into())))
                })
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.content {
            Content::Whole(whole) => whole.is_end_stream(),
            Content::Events { .. } => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.content {
            Content::Whole(whole) => whole.size_hint(),
            Content::Events { .. } => SizeHint::default(),
        }
    }
}
