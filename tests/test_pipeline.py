"""The scripts one after the other as a user runs them, and checkpoints that cross between the TensorFlows."""

import glob
import io
import os
import re
import sys

import numpy as np
import pandas as pd
import pytest
from conftest import assert_readable, call, random_records, run_script, values_of
from PIL import Image

import test_tfrecords
import toTFRecords
import train
import val
from data_input import CLASSES


def test_synthetic_train_val_convert_predict(tmp_path):
  here = {'cwd': str(tmp_path), 'full': True}
  outputs = [run_script('data_input.py', '--synthetic', **here)]
  outputs.append(run_script('train.py', '--num_gpus', 4, '--batch_size', 16, '--max_steps', 4, '--seed', 1, **here))
  outputs.append(run_script('val.py', **here))

  records = np.fromfile(str(tmp_path / 'data' / 'cifar-10-batches-bin' / 'test_batch.bin'), np.uint8).reshape(-1, 3073)
  os.makedirs(str(tmp_path / 'data' / 'test'))
  for i, pixels in enumerate(records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), 1):
    Image.fromarray(pixels).save(str(tmp_path / 'data' / 'test' / ('%d.png' % i)))
  outputs.append(run_script('toTFRecords.py', **here))
  outputs.append(run_script('test_tfrecords.py', **here))
  for done in outputs:
    assert_readable(done.stderr)

  table = pd.read_csv(io.StringIO(outputs[-1].stdout))
  assert list(table['id']) == list(range(1, 2001))
  right = int((table['label'].values == np.array(CLASSES)[records[:, 0]]).sum())
  assert 'accuracy %d / 2000' % right in outputs[2].stdout
  confusion = [line.split()[1:] for line in outputs[2].stdout.splitlines()[-11:-1] if line.split()[0] in CLASSES]
  predicted = np.array(confusion, int).sum(0)
  assert [int((table['label'] == name).sum()) for name in CLASSES] == predicted.tolist()


def test_predictions_of_png_copies_are_the_classes_that_val_counts(tmp_path, wide_awake_copy, capsysbinary):
  labels, images = random_records(tmp_path / 'test_batch.bin', 20, seed=9)
  (tmp_path / 'png').mkdir()
  for i, image in enumerate(images):
    Image.fromarray(image).save(str(tmp_path / 'png' / ('%d.png' % i)))
  call(toTFRecords, '--image_dir', tmp_path / 'png', '--output', tmp_path / 'a')
  capsysbinary.readouterr()
  call(test_tfrecords, '--tfrecords', tmp_path / 'a', '--checkpoint_dir', wide_awake_copy)
  table = pd.read_csv(io.BytesIO(capsysbinary.readouterr().out))
  predicted = np.array([CLASSES.index(name) for name in table['label']])
  call(val, wide_awake_copy, '--data_dir', tmp_path)
  report = capsysbinary.readouterr().out.decode()
  confusion = np.array([line.split()[1:] for line in report.splitlines()[-11:-1]], int)
  assert (confusion == pd.crosstab(labels, predicted).reindex(range(10), columns=range(10), fill_value=0).values).all()
  assert len(set(predicted)) >= 3


# .ci/run has each environment write a folder here before the tests of either run.
EXCHANGE = os.environ.get('CHECKPOINT_EXCHANGE')


@pytest.mark.skipif(not EXCHANGE, reason='needs the checkpoints of both environments: run .ci/run')
def test_checkpoints_of_the_other_tensorflow_are_read_and_trained_on(tmp_path, full_size, capsys):
  assert len(os.listdir(EXCHANGE)) == 2
  (other,) = [name for name in os.listdir(EXCHANGE) if name != '%d.%d' % sys.version_info[:2]]
  folder, data = (os.path.join(EXCHANGE, other, name) for name in ('checkpoints', 'data'))
  with open(os.path.join(EXCHANGE, other, 'val.txt')) as f:
    written = f.read()
  call(val, folder, '--data_dir', data)
  read = capsys.readouterr().out
  numbers = [[float(n) for n in re.findall(r'[\d.]+', text.split('accuracy', 1)[1])] for text in (written, read)]
  assert numbers[0] == pytest.approx(numbers[1], abs=2e-4)

  for name in glob.glob(os.path.join(folder, 'model.ckpt-2.*')):
    os.symlink(name, str(tmp_path / os.path.basename(name)))
  call(train, '--data_dir', data, '--checkpoint_dir', tmp_path, '--batch_size', 4, '--max_steps', 3)
  values = values_of(tmp_path)
  assert values['global_step'] == 3 and values['images_seen'] == 2 * 8 + 4
