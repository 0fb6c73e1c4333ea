"""Channels, below its router, with Django beside it."""

from __future__ import annotations

from channels.generic.http import AsyncHttpConsumer
from channels.routing import ProtocolTypeRouter, URLRouter
from django.urls import path, re_path

from . import base
from .django_app import app as django_app


class Plain(AsyncHttpConsumer):
    async def handle(self, body: bytes) -> None:
        await self.send_response(200, base.plain().encode())


class Idle(AsyncHttpConsumer):
    async def handle(self, body: bytes) -> None:
        await self.send_response(200, (await base.idle()).encode())


class Thread(AsyncHttpConsumer):
    async def handle(self, body: bytes) -> None:
        from asgiref.sync import sync_to_async

        await self.send_response(200, (await sync_to_async(base.in_thread)()).encode())


class Body(AsyncHttpConsumer):
    async def handle(self, body: bytes) -> None:
        await self.send_response(200, base.read(len(body)).encode())


class Stream(AsyncHttpConsumer):
    async def handle(self, body: bytes) -> None:
        await self.send_headers(headers=[(b"content-type", b"text/plain")])
        async for part in base.chunks():
            await self.send_body(part, more_body=True)


class Fails(AsyncHttpConsumer):
    async def handle(self, body: bytes) -> None:
        base.fail()


app = ProtocolTypeRouter(
    {
        "http": URLRouter(
            [
                *(path(cls.__name__.lower(), cls.as_asgi()) for cls in (Plain, Idle, Thread, Body, Stream, Fails)),
                path("sse", Stream.as_asgi()),
                re_path("", django_app),
            ]
        )
    }
)
